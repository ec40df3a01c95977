"""``gkd watch``: runs or follows the user's own job and says where it stands still.

``samples`` has the values that pass between the modules: a ``JobSample`` is one look
at the job, a ``Verdict`` what is true of it, a ``Role`` what a process does in it. Pure
are ``roles``, ``verdicts``, ``stack_tree`` and ``waits``. The job itself is met by
``relay``, ``log_tail``, ``sampling`` and ``evidence``. ``watcher`` leads.

On a standstill ``stuck_report`` calls, with the last sample that has stacks:
``stack_tree.text(processes)``, the tree as lines of text; ``waits.sentences(sample)``,
who waits for whom, a sentence each; ``evidence.collect(sample, directory, limit_s)``,
files below a directory, and a sentence for each find.
"""

# In the environment of a watched command and all it starts: the watch's directory.
ENVIRONMENT = "PYTEST_GKD_WATCH"
