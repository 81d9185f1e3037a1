"""Compare policies on the tasks of lm-evaluation-harness; a run can be resumed.

`run` asks every combination of task, length, policy, rate and question, and adds a line to the
folder for each sample; `load` reads a folder, finished or not, and `load_joined` several as one;
`write_report` makes their page.
"""

from typing import TYPE_CHECKING

from kvpolicy.lazy import lazy_names

if TYPE_CHECKING:
    from kvpolicy.evaluation.intervals import Difference, paired_difference
    from kvpolicy.evaluation.suite.folder import Results, load
    from kvpolicy.evaluation.suite.joining import load_joined
    from kvpolicy.evaluation.suite.report import write_report
    from kvpolicy.evaluation.suite.runner import Listener
    from kvpolicy.evaluation.suite.sample import Answer, Cell, Document, Method, Sample
    from kvpolicy.evaluation.suite.settings import Settings
    from kvpolicy.evaluation.suite.study import run
    from kvpolicy.evaluation.suite.summary import Cost, Figure, Summary
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "kvpolicy.evaluation.intervals": ("Difference", "paired_difference"),
            "kvpolicy.evaluation.suite.folder": ("Results", "load"),
            "kvpolicy.evaluation.suite.joining": ("load_joined",),
            "kvpolicy.evaluation.suite.report": ("write_report",),
            "kvpolicy.evaluation.suite.runner": ("Listener",),
            "kvpolicy.evaluation.suite.sample": ("Answer", "Cell", "Document", "Method", "Sample"),
            "kvpolicy.evaluation.suite.settings": ("Settings",),
            "kvpolicy.evaluation.suite.study": ("run",),
            "kvpolicy.evaluation.suite.summary": ("Cost", "Figure", "Summary"),
        },
    )

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
    "load_joined",
    "paired_difference",
    "run",
    "write_report",
]
