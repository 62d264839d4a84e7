"""What a program can look at: how its model is sharded, what is in memory, and what a step sends, when and why."""

from dshard.inspection.explain import Explanation as Explanation
from dshard.inspection.explain import UnitRow as UnitRow
from dshard.inspection.explain import explain as explain
from dshard.inspection.tracing import Event as Event
from dshard.inspection.tracing import Report as Report
from dshard.inspection.tracing import Trace as Trace
from dshard.inspection.tracing import report as report
from dshard.inspection.tracing import trace as trace
