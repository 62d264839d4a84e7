"""Records of plans that older versions wrote: what they did not know of, as it was then."""

from typing import Any

_BEFORE_MEMORY = 3  # which knew nothing of memory that ranks share
_BEFORE_CHECKPOINTING = 4  # nor this of a choice of activation checkpointing, nor of what is known of times
OLDER = (_BEFORE_MEMORY, _BEFORE_CHECKPOINTING)


def note_what_was_not_known(record: dict[str, Any], schema: int) -> None:
    """Have an older record say what was so without being said, as far as it has the parts."""
    if schema == _BEFORE_MEMORY:
        _note_messages(record)
    model, certificate = record.get("model"), record.get("certificate")
    units = model.get("units") if isinstance(model, dict) else None
    for unit in units if isinstance(units, list) else ():
        if isinstance(unit, dict):
            unit |= {"checkpointing": "none", "alternatives": [], "work": []}
    if isinstance(certificate, dict) and isinstance(units, list):
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
