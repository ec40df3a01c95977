"""``gkd watch``: runs or follows the user's own job and says where it stands still.

``samples`` has the values that pass between the modules: a ``JobSample`` is one look
at the job, a ``Verdict`` what is true of it, a ``Role`` what a process does in it. Pure
are ``roles``, ``verdicts``, ``stack_tree`` and ``waits``. The job itself is met by
``relay``, ``log_tail``, ``sampling`` and ``evidence``. ``watch_job`` begins: with
``started`` or ``attached``, which feed a ``watcher``.

On a standstill ``stuck_report`` calls, with the last sample that has stacks:
``evidence.collect``, what else is known; ``waits.picture``, who waits for whom, a
sentence each; ``stack_tree.build``, the tree as lines of text and as JSON.
"""
