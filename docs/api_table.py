"""Writes docs/api.md, the public names with the first line of their docstrings: `python docs/api_table.py`."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("dshard", "dshard.checkpoint", "dshard.interop", "dshard.optim", "dshard.planner", "dshard.testing")
GROUPS = {
    "Sharding": "fully_shard set_strategy Strategy MixedPrecisionPolicy OffloadPolicy CPUOffloadPolicy "
    "init_hybrid_mesh register_fsdp_forward_method share_comm_ctx to_plain",
    "What a model has afterwards": "ShardedTensor FSDPModule UnshardHandle",
    "In a step": "clip_grad_norm_ no_sync join run_by_some",
    "Full values, and files of them": "gathered iter_full load_safetensors save_safetensors",
    "Looking at it": "explain report trace CommTrace",
    "Plans": "plan Plan plan_report",
    "Errors": "DShardError ArgumentError CheckpointError DivergenceError RankLostError PlacementError PlanError "
    "StateError UnsupportedOpError",
}
VALUES = {
    "DEVICES": "Devices by name, each with the datasheet that its figures are from.",
    "EFFICIENCY": "The one set of constants that predictions use.",
}
HEAD = """# The public names

Each with the first line of its docstring and the file where it is. `help(dshard.fully_shard)` shows the rest:
arguments, errors, what is sent. `make docs` builds all of it as HTML into `build/docs`, with these pages
([index](index.md)).

What is not here may change. `python docs/api_table.py` writes this page.
"""


def row(module: str, name: str) -> str:
    """A line of a table."""
    value: Any = inspect.unwrap(getattr(import_module(module), name))
    if name in VALUES:
        return f"| `{name}` | {VALUES[name]} |"
    if value.__module__.startswith("torch."):
        return f"| `{name}` | The class of `{value.__module__}`. |"
    first = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split()).replace("|", "\\|")
    return f"| [`{name}`](../{value.__module__.replace('.', '/')}.py) | {first} |"


def page() -> str:
    """The text of docs/api.md."""
    sections = []
    grouped = {title: ("dshard", names.split()) for title, names in GROUPS.items()}
    for module in MODULES[1:]:
        grouped[f"`{module}`"] = (module, sorted(import_module(module).__all__, key=str.lower))
    for title, (module, names) in grouped.items():
        rows = "\n".join(row(module, name) for name in names)
        sections.append(f"## {title}\n\n| name | |\n|---|---|\n{rows}\n")
    return "\n".join([HEAD, *sections])


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(page())
