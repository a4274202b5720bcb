"""A user's model and batch by name: `file.py:function`, `module:function`, `hf:CONFIG.json`.

Enters: what the command line, `compare` or a worker of it was given. Leaves: a `Target`. Nothing
here plans.
"""
