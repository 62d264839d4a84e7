"""Trains a small model with checkpoints, as a script below torchrun; a fault strikes one rank of its first start.

train.py CONFIG.json     (see `Config` in plan.py)
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.collectives import _c10d

WIDTH = 12


class Injected(Exception):
    pass


class Striker:
    """Does to this rank, at the place that a fault names, what it says."""

    def __init__(self, fault: dict[str, Any] | None, rank: int) -> None:
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        self.fault = fault if fault is not None and fault["rank"] == rank and is_first else None
        self.left = fault["after"] if fault else 0  # events to let pass
        self.is_armed = False

    def at(self, place: str, step: int = 0) -> bool:
        """Whether the fault belongs here."""
        return self.fault is not None and self.fault["place"] == place and self.fault["step"] == step

    def count(self) -> None:
        """One more event of those that are counted."""
        if self.is_armed:
            self.left -= 1
            if self.left < 0:
                self.strike()

    def strike(self) -> None:
        assert self.fault is not None
        kind, self.is_armed, self.fault = self.fault["kind"], False, None
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "sleep":
            time.sleep(600)
        elif kind == "raise":
            raise Injected("an injected fault")
        elif kind == "oom":
            torch.empty(1 << 60)
        elif kind == "exit":
            sys.exit(0)
        elif kind == "_exit":
            os._exit(0)

    def later(self, seconds: float) -> None:
        """Strike from the outside, wherever this rank is by then."""
        timer = threading.Timer(seconds, self.strike)
        timer.daemon = True
        timer.start()


def build(width: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


def shard(model: Any, strategy: str) -> Any:
    for block in list(model)[:-1]:
        dshard.fully_shard(block, strategy=strategy)
    return dshard.fully_shard(model, strategy=strategy)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit that training depends on."""
    found = hashlib.sha256()
    for name, param in model.named_parameters():
        for value in (param, *(v for _, v in sorted(optimizer.state.get(param, {}).items()))):
            plain = whole(value.detach()) if isinstance(value, Tensor) else torch.tensor(value)
            found.update(name.encode() + plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save(out: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, *, asynchronous: bool) -> Any:
    target = out / f"step-{step:04d}"
    return dshard.checkpoint.save(target, model, optimizer, step=step, extra={"step": step}, asynchronous=asynchronous)


def load(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The newest checkpoint's step; 0 if there is none."""
    return int(dshard.checkpoint.load(out, model, optimizer)["step"]) if any(out.glob("step-*")) else 0


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randint(4, (4,), generator=generator)


def strike_behind(striker: Striker, out: Tensor) -> None:
    out.register_hook(lambda grad: striker.strike() if striker.fault is not None else None)


def arm_step(striker: Striker, model: Any, optimizer: torch.optim.Optimizer, step: int) -> list[Any]:
    """Set a fault up for this step; gives hooks to remove."""
    hooks: list[Any] = []
    if striker.at("forward", step):
        module = list(model.modules())[striker.left % len(list(model.modules()))]
        hooks.append(
            module.register_forward_pre_hook(lambda *_: striker.strike() if striker.fault is not None else None)
        )
    elif striker.at("backward", step):
        module = model[striker.left % len(model)]
        hooks.append(module.register_forward_hook(lambda module, args, out: strike_behind(striker, out)))
    elif striker.at("collective", step):
        striker.is_armed = True
    elif striker.at("step", step):
        register = optimizer.register_step_post_hook if striker.left % 2 else optimizer.register_step_pre_hook
        hooks.append(register(lambda *_: striker.strike() if striker.fault is not None else None))
    return hooks


def run(config: dict[str, Any], striker: Striker, rank: int) -> dict[str, Any]:
    fault, out = config["fault"] or {}, Path(config["out"])
    model = build(16 + 4 * striker.at("join") * (fault.get("kind") == "other model"))
    if striker.at("join") and fault["kind"] == "other torch":
        torch.__version__ = "2.9.1"  # type: ignore[misc]
    if striker.at("time"):
        striker.later(fault["after"] / 1000)
    shard(model, config["strategy"]).set_check_gradients(fault.get("kind") == "nan")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    striker.is_armed = striker.at("load")
    first = load(out, model, optimizer)
    striker.is_armed = False
    if striker.at("load"):
        striker.strike()
    pending = None
    report: dict[str, Any] = {"first": first, "start": digest(model, optimizer), "steps": {}}
    for step in range(first, config["steps"]):
        hooks = arm_step(striker, model, optimizer, step)
        inputs, targets = batch(step, rank)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if striker.at("nan", step):
            loss = loss * float("nan")
        loss.backward()
        dshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for hook in hooks:
            hook.remove()
        if striker.fault is not None and step >= fault["step"] and fault["place"] in ("collective",):
            striker.strike()
        if config["digests"]:
            report["steps"][step + 1] = digest(model, optimizer)
        if (step + 1) % config["every"] == 0:
            striker.is_armed = striker.at("save", step)
            pending = save(out, step + 1, model, optimizer, asynchronous=config["asynchronous"])
            if pending is not None and step + 1 == config["steps"]:
                pending.result()
        if striker.at("save", step) and (pending is None or pending.done()):
            striker.strike()
    return report | {"end": digest(model, optimizer)}


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if config["errors"]:
        target = os.open(Path(config["errors"], f"{rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, 2)
    striker = Striker(config["fault"], rank)
    if striker.fault is not None and striker.fault["place"] in ("save", "load"):
        names = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir")
        sys.addaudithook(lambda event, _: striker.count() if event in names else None)
    if striker.fault is not None and striker.fault["place"] == "collective":
        send = _c10d.send
        _c10d.send = lambda *args: (striker.count(), send(*args))[1]
    dist.init_process_group("gloo", timeout=timedelta(seconds=config["timeout_s"]))
    store = dist.distributed_c10d._get_default_store()
    store.set(f"joined {rank}", "")
    if striker.fault is not None:  # what others raise while they are within torch's own start, dshard cannot see
        store.wait([f"joined {each}" for each in range(dist.get_world_size())])
    report = run(config, striker, rank)
    if rank == 0:
        Path(config["report"]).write_text(json.dumps(report))
    dist.barrier()
    if striker.at("end"):
        striker.strike()
    print("came to its end", file=sys.stderr)
    if config["fault"] is None:
        os._exit(0)  # how an interpreter ends is looked at where a fault was
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
