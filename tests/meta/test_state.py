"""What a process keeps beside its models: everything that changes at module or class level is listed, with why."""

import ast
from collections.abc import Iterator

import pytest

from tests.meta.source import Module, imported_names, modules

# What changes after import, and why it is the process's and no model's. To add a row is a decision: first look for the
# object that could hold it. A class stands for all that it has.
ALLOWED: dict[str, str] = {
    # What a process has one of: connections, a watching thread, its end.
    "dshard.collectives._c10d._KEPT": "channels, records and further groups of a process group, which goes with them",
    "dshard.collectives._c10d._MADE": "numbers in the names of process groups, which torch's store never forgets",
    "dshard.collectives.host.arena._Known": "a process shares one memory, and maps that of each other one once",
    "dshard.collectives.host.rings._GONE": "what was said in a group that is gone stays until peers have read it",
    "dshard.collectives.host.rings._LISTENING": "a rank that waits in one ring reads all, or peers wait for it",
    "dshard.collectives.ledger._Ledger.alive": "the one thread that watches looks at what was noted in all groups",
    "dshard.collectives.ledger._Ledger.forward": "forwards are told apart in a process, whatever the models",
    "dshard.collectives.watchdog._State": "one thread watches all that a process waits for, and its end",
    "dshard.collectives.trace._Open.traces": "a trace records the collectives of the process, whoever starts them",
    "dshard.collectives.trace._Open.phase": "bound at import: rooms above know in which phase their models are",
    "dshard.collectives.flight._State": "read from the environment once; a process has one record",
    "dshard.autograd.Watchers.present": "gathers look at the process's, as at a profiler",
    "dshard.checkpoint.saving._PENDING": "a group of ranks has one asynchronous save, from whatever model it is",
    "dshard.checkpoint.saving._MEMORY": "the next asynchronous save takes the memory of the last one",
    "dshard.checkpoint.saving._OPEN": "an optimizer's step waits for all copies that are being made",
    "dshard.checkpoint.saving._WATCHED": "steps are watched from the first snapshot on, once",
    "dshard.join._OPEN": "one model is followed at a time",
    "dshard.clip._LISTENERS": "clip_grad_norm_ is a function of parameters, and knows no model",
    # What torch tells or asks of the process: steps, registrations, hooks without an object.
    "dshard.compiling.Pause": "dynamo's callback is of the thread, and it is called for no object of ours",
    "dshard.runtime.module_hooks._Awaiting": "a module of any model may take what depends on a region",
    "dshard.optimizer.steps._Steps": "torch's hooks around steps are of all optimizers",
    "dshard.optimizer.swap._Current": "the step that runs, which is found again where it raised",
    "dshard.optimizer.deferred.Deferral": "the step that runs, as above",
    "dshard.optimizer.deferred._Thread": "one thread for the steps of all optimizers, which share the host's cores",
    "dshard.optimizer.deferred._States.(any)": "methods of a dict that wait first, made when the class is defined",
    "dshard.optimizer.eight_bit._table": "what codes mean, which does not change",
    "dshard.optimizer.owners._kept_by_muon": "what torch's Muon keeps, which does not change",
    "dshard.optimizer.replace._NUM_MOVES": "tells cheaply that no parameter moved since an optimizer was looked at",
    "dshard.units.copies.FULL_TENSORS": "what autograd saves may be of any model; its memory tells",
    "dshard.runtime.unsharding._Transforms": "transforms of torch.func ask one function of torch, for all models",
    "dshard.runtime.late._Registrations": "torch's hooks for registered parameters and modules are of all modules",
    "dshard.runtime.module.AcceptedHints.(any)": "names that DDP's users call, made when the class is defined",
    "dshard.runtime.module.FSDPModule.set_reduce_scatter_divide_factor": "an older name, bound at import",
    "dshard.tensor.storage._Step": "the step that runs: an operation cannot be told which optimizer calls it",
    "dshard.tensor.dispatch._Lazy.is_made": "programs without complex numbers need not look for conjugated views",
    "dshard.tensor.storage._MOVES": "a lock of the process: who reads in a thread of its own knows no model",
    # Of classes: torch looks at classes, not at objects, before any code of ours runs.
    "dshard.tensor.sharded_tensor.ShardedTensor.__tensor_unflatten__": "bound at import: tracing is above the class",
    "dshard.tensor.sharded_tensor.ShardedTensor.adopt": "bound at import: the runtime stands above the class",
    "dshard.tensor.sharded_tensor.ShardedTensor.runs_forward": "bound at import: the runtime stands above the class",
    "dshard.tensor.sharded_tensor.ShardedTensor._dispatch": "the op table stands above the class; tracing adds rules",
    "dshard.tensor.sharded_tensor.ShardedBase.grad": "a process that has compiled hides gradients from graphs",
    "dshard.tensor.sharded_tensor.ShardedTensor._dispatch_beside": "bound at import: rules beside DTensors stand above",
    "dshard.tensor.traced._keep_writes": "bound at import: the rules of graphs stand above the class",
    "dshard.tensor.storage._Exposed": "torch's operations of collectives are of the process",
    "dshard.tensor.traced.TracedSource.dispatch": "bound at import: the rules of graphs stand above the class",
    "dshard.tensor.traced.TracedGather.run": "bound at import: an operation of torch's library has no model",
    "dshard.tensor.sharded_tensor.MixedShardedTensor": "asks for torch's functions in a forward; see its docstring",
    "dshard.tensor.meshes.TPShardLayout.num_made": "programs without tensor parallelism need not look for it",
    "dshard.tensor.sharded_tensor.OffloadedShardedTensor.num_made": "programs without offload need not look for it",
    "dshard.tensor.sharded_tensor.SHARDED": "filled as classes are defined; a set is faster to ask than isinstance",
    "dshard.tensor.sharded_tensor.OffloadedShardedTensor.kin": "itself, set once as it is defined",
    "dshard.tensor.sharded_tensor.ShardedTensor.kin": "itself, set once as it is defined",
    "dshard.tensor.sharded_tensor.VIEWS": "filled as classes are made for tensor subclasses",
    "dshard.tensor.dispatch.asked_before": "one class for each pair of classes",
    "dshard.runtime.module.sharded_class": "one class for each class of modules",
    "dshard.units.unit.Unit.alive": "the units whose copies a change of parameters may make stale; held weakly",
    # Results of pure functions.
    "dshard.collectives.flight.is_users": "remembered by file",
    "dshard.collectives.plan._PLANS": "equal plans are one object; held weakly",
    "dshard.tensor.dispatch._RULES": "remembered by operation",
    "dshard.tensor.meshes._SHARED_DIMS": "remembered by meshes, which are held weakly",
    "dshard.tensor.meshes._WITHIN": "process groups are never freed, so neighbours on a mesh are made once",
    "dshard.tensor.sharded_tensor._num_kept": "remembered by function",
    "dshard.units.copies._NOWHERE": "without a stream, it never changes",
    "dshard.tensor.table.classify": "remembered by operation",
    "dshard.tensor.table.mutated_arguments": "remembered by operation",
    "dshard.tensor.views.empty_of": "one empty tensor of each dtype and device",
    "dshard.checkpoint.saving._LINEAGES": "the run of a model, which need not be sharded; held weakly",
    "dshard.runtime.runtime._Places.by_shard": "a compiled graph knows a shard's address, and no model",
    # Constants of classes that are not frozen.
    "dshard.tensor.meshes._STEP": "never changes; views are made often, and a frozen class is slower to make",
}

CACHES = ("cache", "lru_cache")
CHANGES = (
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove"),
    *("reverse", "set", "setdefault", "sort", "subtract", "update"),
)


def last_word(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).split(".")[-1]


def changed_by(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement or call assigns to, or changes in place: `x` of `x.append(1)` and of `x[0] = 1`, as `x[...]`."""
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        yield ast.Subscript(node.func.value, ast.Constant(0), ast.Load())
    elif isinstance(node, ast.Call) and last_word(node) == "setattr" and isinstance(node.func, ast.Name):
        yield ast.Attribute(node.args[0], "(any)", ast.Store())


def names_in(module: Module, known: dict[str, Module]) -> dict[str, str]:
    """Full names of what a module binds at its top, or imports from another one of the package."""
    found = {}
    for node in module.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        names += [node.name] if isinstance(node, ast.ClassDef) else []
        found |= {name: f"{module.name}.{name}" for name in names}
    for name, _ in imported_names(module):
        if name not in known and (home := made_in(name, known)):
            found[name.rpartition(".")[2]] = home
    return found


def made_in(name: str, known: dict[str, Module]) -> str:
    """The full name of an imported one where it is bound, behind those that hand it on; empty if it is no such name."""
    home, _, last = name.rpartition(".")
    if home not in known:
        return ""
    sources = [each for each, _ in imported_names(known[home]) if each.endswith(f".{last}") and each != name]
    return next(filter(None, (made_in(each, known) for each in sources)), name)


def changes(module: Module, known: dict[str, Module]) -> Iterator[str]:
    """What a module's code changes at module or class level, whosever it is."""
    full = names_in(module, known)
    for top in module.tree.body:
        own = top.name if isinstance(top, ast.ClassDef) else ""
        for node in ast.walk(top):
            if isinstance(node, ast.Global):
                yield from (full[name] for name in node.names)
            if isinstance(node, ast.FunctionDef) and any(last_word(each) in CACHES for each in node.decorator_list):
                yield f"{module.name}.{node.name}"
            for target in changed_by(node):
                base = target
                while isinstance(base, ast.Subscript):
                    base = base.value
                if isinstance(base, ast.Name) and base is not target and base.id in full:
                    yield full[base.id]
                elif isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
                    owner = own if base.value.id == "cls" else base.value.id
                    if owner in full and owner.lstrip("_")[:1].isupper() and not owner.isupper():
                        yield f"{full[owner]}.{base.attr}"


def instances(module: Module, known: dict[str, Module]) -> Iterator[str]:
    """Objects of the package's own classes, unless those are frozen, that a module or a class in it keeps."""
    full = names_in(module, known)
    places = [("", module.tree), *((f"{n.name}.", n) for n in module.tree.body if isinstance(n, ast.ClassDef))]
    for prefix, holder in places:
        for node in holder.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                name = full.get(ast.unparse(node.value.func), "")
                made = known.get(name.rpartition(".")[0])
                if made is not None and is_changing_class(made, name.rpartition(".")[2]):
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    yield f"{module.name}.{prefix}{ast.unparse(target)}"


def is_changing_class(module: Module, name: str) -> bool:
    found = [n for n in module.tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    return any("frozen=True" not in "".join(map(ast.unparse, each.decorator_list)) for each in found)


def state_of(known: dict[str, Module]) -> set[str]:
    """What changes at module or class level, as `module.name` or `module.Class.name`."""
    return {name for module in known.values() for find in (changes, instances) for name in find(module, known)}


def test_all_that_changes_beside_models_is_listed_with_a_reason():
    found = state_of(modules())
    listed = {name: next((row for row in ALLOWED if f"{name}.".startswith(f"{row}.")), None) for name in found}
    missing, gone = sorted(name for name in found if not listed[name]), sorted(set(ALLOWED) - set(listed.values()))
    assert not missing, f"is there an object that could hold these? {missing}"
    assert not gone, f"these change no more: {gone}"
    assert all(len(why) > 10 for why in ALLOWED.values())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("KNOWN = {}\ndef f(x):\n    KNOWN[x] = 1", "KNOWN"),
        ("KNOWN = []\ndef f(x):\n    KNOWN.append(x)", "KNOWN"),
        ("KNOWN = {}\ndef f(x):\n    del KNOWN[x]", "KNOWN"),
        ("KNOWN = [0]\ndef f():\n    KNOWN[0] += 1", "KNOWN"),
        ("count = 0\ndef f():\n    global count\n    count = 1", "count"),
        ("class _State:\n    last = 0\ndef f():\n    _State.last = 1", "_State.last"),
        ("class _State:\n    all = []\ndef f():\n    _State.all.append(1)", "_State.all"),
        ("class Made:\n    num = 0\n    @classmethod\n    def f(cls):\n        cls.num += 1", "Made.num"),
        ("from functools import cache\n@cache\ndef f(x):\n    return x", "f"),
        ("class Board:\n    pass\nBOARD = Board()", "BOARD"),
    ],
)
def test_what_changes_is_found_in_every_spelling(tmp_path, text, name):
    package = tmp_path / "dshard"
    package.mkdir()
    (package / "layout.py").write_text(text)
    assert state_of(modules(package)) == {f"dshard.layout.{name}"}


def test_what_another_module_changes_is_found_and_tables_are_none(tmp_path):
    package = tmp_path / "dshard"
    package.mkdir()
    (package / "layout.py").write_text(
        "KNOWN = set()\nTABLE = {1: 2}\ndef f(x):\n    known = {}\n    known[x] = TABLE[x]\n"
    )
    (package / "clip.py").write_text("from dshard.layout import KNOWN\nKNOWN.add(int)\n")
    assert state_of(modules(package)) == {"dshard.layout.KNOWN"}
