"""JAX's CPU backend with four devices, for the programs that need them; and the table at the end of the run."""

import os
import re
from collections import Counter

import pytest

# Before any backend starts.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print on how many programs each member, each parameter and each way of staging agreed."""
    counts: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            match = re.search(r"conformance/test_(?:members|programs)\.py::test_(\w+)(?:\[(.*)\])?", report.nodeid)
            if match and report.when == "call":
                member = match[1] == "a_member_is_as_in_jax"
                row = match[2].rpartition("-")[0] if member else match[1].replace("_", " ")
                counts.setdefault(row, Counter())[outcome] += 1
    if counts:
        terminalreporter.section("conformance")
        for row, outcomes in counts.items():
            terminalreporter.line(f"{row:<75} {outcomes['passed']:>3} agree {outcomes['failed']:>3} differ")
