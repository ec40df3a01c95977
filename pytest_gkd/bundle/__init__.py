"""``gkd bundle``: one archive with what somebody needs who is to help with a run."""
