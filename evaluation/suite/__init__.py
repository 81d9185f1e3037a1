"""Answer lm-evaluation-harness tasks under many policies, cell by cell, into a folder of results.

`tasks.py` finds tasks and makes their prompts, `answering.py` asks them, `folder.py` keeps what was
answered, and `table.py` shows it.
"""
