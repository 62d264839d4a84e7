"""Records of plans that older versions wrote: what they did not know of, as it was then."""

from typing import Any

_BEFORE_MEMORY = 3  # which knew nothing of memory that ranks share
_BEFORE_CHECKPOINTING = 4  # nor this of a choice of activation checkpointing, nor of what is known of times
_BEFORE_CUT_LAYERS = 5  # nor this of layers that are cut over ranks, of offload, nor of dims that are cut
_BEFORE_SOME_OFFLOAD = 6  # nor this of units of which each may be kept elsewhere than others
OLDER = (_BEFORE_MEMORY, _BEFORE_CHECKPOINTING, _BEFORE_CUT_LAYERS, _BEFORE_SOME_OFFLOAD)


def note_what_was_not_known(record: dict[str, Any], schema: int) -> None:
    """Have an older record say what was so without being said, as far as it has the parts."""
    if schema == _BEFORE_MEMORY:
        _note_messages(record)
    if schema < _BEFORE_CUT_LAYERS:
        _note_no_choices(record)
    if schema < _BEFORE_SOME_OFFLOAD:
        _note_whole_layers(record)
    units = _units_of(record)
    for certificate in _dicts([record.get("certificate")]):
        modes = certificate.pop("fastest_checkpointing", None)
        if isinstance(modes, list) and len(modes) == len(units):  # all were kept in one place
            away = [unit.get("home_s_per_byte", 0) != 0 for unit in units]
            pairs = zip(modes, away, strict=True)
            certificate["fastest_kinds"] = [{"checkpointing": mode, "is_offloaded": is_away} for mode, is_away in pairs]


def _note_whole_layers(record: dict[str, Any]) -> None:
    """Have a record be one of whole layers on the device, cut along dim 0, and of a limit of live bytes."""
    for certificate in _dicts([record.get("certificate")]):
        certificate |= {"left_bytes": 0, "memory_of": "live"}
    for part in _dicts([record.get("model"), record.get("cluster")]):
        part |= {"tensor_parallel": 1}
    for unit in _units_of(record):
        for kind in (unit, *_dicts(unit.get("alternatives"))):
            kind |= {"home_s_per_byte": 0.0}
            for param in _dicts(kind.get("params")):
                param |= {"dim": 0}
            for work in _dicts(kind.get("work")):
                work |= {"cut_s": 0.0}


def _units_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    (model,) = _dicts([record.get("model")]) or ({},)
    return _dicts(model.get("units"))


def _dicts(value: Any) -> list[dict[str, Any]]:
    """What of a list can be a part of a plan."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _note_no_choices(record: dict[str, Any]) -> None:
    """Have a record be one without activation checkpointing."""
    units = _units_of(record)
    for unit in units:
        unit |= {"checkpointing": "none", "alternatives": [], "work": []}
    for certificate in _dicts([record.get("certificate")]):
        certificate["fastest_checkpointing"] = ["none"] * len(units)
    record["doubt"] = record.get("doubt")
    if isinstance(record.get("cluster"), dict):
        record["cluster"] |= {"interference": 0.0, "stragglers": 0.0}


def _note_messages(record: dict[str, Any]) -> None:
    """Have all links of a record be those of ranks that exchange messages, as far as it has links."""
    cluster = record.get("cluster")
    if not isinstance(cluster, dict):
        return
    given = [cluster.get("inside"), cluster.get("across")]
    for name in ("shards", "replicas"):
        given += cluster[name].values() if isinstance(cluster.get(name), dict) else []
    for links in given:
        if isinstance(links, dict):
            links["in_place"] = None
