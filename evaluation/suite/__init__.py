"""Compare policies on the tasks of lm-evaluation-harness; a run can be resumed.

`run` asks every combination of task, length, policy, rate and question, and adds a line to the
folder for each sample; `load` reads a folder, finished or not; `write_report` makes its page.
"""

from kvpolicy.evaluation.intervals import Difference, paired_difference
from kvpolicy.evaluation.suite.folder import Results, load
from kvpolicy.evaluation.suite.report import write_report
from kvpolicy.evaluation.suite.runner import Listener
from kvpolicy.evaluation.suite.sample import Answer, Cell, Document, Method, Sample
from kvpolicy.evaluation.suite.study import Settings, run
from kvpolicy.evaluation.suite.summary import Cost, Figure, Summary

__all__ = [
    "Answer",
    "Cell",
    "Cost",
    "Difference",
    "Document",
    "Figure",
    "Listener",
    "Method",
    "Results",
    "Sample",
    "Settings",
    "Summary",
    "load",
    "paired_difference",
    "run",
    "write_report",
]
