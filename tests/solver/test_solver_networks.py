"""Generators of realistic problems, and one test that they are problems at all."""

from __future__ import annotations

from autoremat_solver import Op, Phase, Problem, Value

MIB = 1 << 20


class Network:
    """Collects the operations of a forward, then writes its backward in reverse."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.outputs: list[str] = []
        self._backward: list[tuple[str, str, tuple[str, ...], tuple[str, ...], float, int]] = []

    def op(
        self,
        name: str,
        inputs: tuple[str, ...],
        nbytes: int,
        time_us: float,
        *,
        saves: tuple[str, ...] = (),
        weight_nbytes: int = 0,
        recomputable: bool = True,
    ) -> str:
        """Add a forward operation; `saves` are what its backward reads ("out": its output)."""
        self.values.append(Value(name, nbytes))
        self.ops.append(Op(f"op_{name}", inputs, (name,), time_us, recomputable=recomputable))
        saved = tuple(name if s == "out" else s for s in saves)
        self._backward.append((name, f"op_{name}", inputs, saved, time_us, weight_nbytes))
        return name

    def problem(self, loss: str) -> Problem:
        """Write the backward: one operation per input gradient, one per weight."""
        size = {v.name: v.nbytes for v in self.values}
        grad: dict[str, str] = {}
        for name, _, inputs, saved, time_us, weight in reversed(self._backward):
            upstream = (grad[name],) if name in grad else ()
            if not upstream and name != loss:
                continue
            for source in dict.fromkeys(inputs):
                value = f"g_{source}_by_{name}"
                self.values.append(Value(value, size[source]))
                self.ops.append(
                    Op(f"bw_{value}", upstream + saved, (value,), time_us, phase=Phase.BACKWARD)
                )
                if source in grad:
                    total = f"s_{source}_by_{name}"
                    self.values.append(Value(total, size[source]))
                    self.ops.append(
                        Op(
                            f"bw_{total}",
                            (grad[source], value),
                            (total,),
                            1.0,
                            phase=Phase.BACKWARD,
                        )
                    )
                    value = total
                grad[source] = value
            if weight:
                value = f"w_{name}"
                self.values.append(Value(value, weight))
                self.ops.append(
                    Op(f"bw_{value}", upstream + saved, (value,), time_us, phase=Phase.BACKWARD)
                )
                self.outputs.append(value)
        return Problem(tuple(self.values), tuple(self.ops), tuple(self.outputs))


def chain(
    length: int,
    nbytes: int = 4 * MIB,
    gradient_nbytes: int = 0,
    time_us: float = 10.0,
    *,
    loss_nbytes: int = 4,
) -> Problem:
    """x1 -> x2 -> ... -> loss; the backward of each reads its output."""
    net = Network()
    last = ""
    for i in range(length):
        last = net.op(
            f"x{i}",
            (last,) if last else (),
            nbytes,
            time_us,
            saves=("out",),
            weight_nbytes=gradient_nbytes,
        )
    loss = net.op("loss", (last,), loss_nbytes, 1.0)
    return net.problem(loss)


def mlp(layers: int = 64, nbytes: int = 4 * MIB, gradient_nbytes: int = MIB // 4) -> Problem:
    """Linear -> gelu per layer; a linear's weight gradient reads its input, gelu its input."""
    net = Network()
    last = net.op("embed", (), nbytes, 5.0)
    for i in range(layers):
        hidden = net.op(
            f"lin{i}", (last,), nbytes, 20.0, saves=(last,), weight_nbytes=gradient_nbytes
        )
        last = net.op(f"act{i}", (hidden,), nbytes, 2.0, saves=(hidden,))
    loss = net.op("loss", (last,), 4, 1.0)
    return net.problem(loss)


def transformer(layers: int, width: int = MIB, *, tiny: int = 3) -> Problem:
    """Residual stream with attention and MLP branches; mixed sizes and times, a shared mask."""
    net = Network()
    mask = net.op("mask", (), width // 8, 1.0)
    stream = net.op("embed", (), width, 5.0, weight_nbytes=8 * width)
    for i in range(layers):
        p = f"l{i}_"
        stat = net.op(p + "stat1", (stream,), 4096, 2.0)
        norm = net.op(p + "ln1", (stream, stat), width, 4.0, saves=(stream, stat))
        qkv = net.op(p + "qkv", (norm,), 3 * width, 30.0, saves=(norm,), weight_nbytes=3 * width)
        split = net.op(p + "split", (qkv,), 3 * width, 3.0)
        for t in range(tiny):
            net.op(p + f"tiny{t}", (stat,), 512, 0.5)
        attention = net.op(p + "attn", (split, mask), width, 25.0, saves=(split, "out", mask))
        project = net.op(
            p + "proj", (attention,), width, 10.0, saves=(attention,), weight_nbytes=width
        )
        stream = net.op(p + "add1", (stream, project), width, 3.0)
        stat = net.op(p + "stat2", (stream,), 4096, 2.0)
        norm = net.op(p + "ln2", (stream, stat), width, 4.0, saves=(stream, stat))
        up = net.op(p + "up", (norm,), 4 * width, 40.0, saves=(norm,), weight_nbytes=4 * width)
        act = net.op(p + "gelu", (up,), 4 * width, 8.0, saves=(up,))
        down = net.op(p + "down", (act,), width, 40.0, saves=(act,), weight_nbytes=4 * width)
        stream = net.op(p + "add2", (stream, down), width, 3.0)
    logits = net.op("logits", (stream,), 16 * width, 60.0, saves=(stream,), weight_nbytes=8 * width)
    soft = net.op("softmax", (logits,), 16 * width, 10.0, saves=("out",))
    loss = net.op("loss", (soft,), 4, 1.0)
    return net.problem(loss)


def unet(depth: int, width: int = 8 * MIB) -> Problem:
    """Down path, bottom, up path; each up step reads the down step of the same size."""
    net = Network()
    last = net.op("stem", (), width, 10.0)
    skips = []
    for i in range(depth):
        size = max(width >> i, 4096)
        for k in range(2):
            conv = net.op(
                f"d{i}_conv{k}", (last,), size, 40.0, saves=(last,), weight_nbytes=size // 8
            )
            last = net.op(f"d{i}_act{k}", (conv,), size, 4.0, saves=(conv,))
        skips.append(last)
        last = net.op(f"d{i}_pool", (last,), size // 2, 3.0, saves=(last,))
    for i in reversed(range(depth)):
        size = max(width >> i, 4096)
        up = net.op(f"u{i}_up", (last,), size, 10.0)
        last = net.op(f"u{i}_cat", (up, skips[i]), 2 * size, 4.0)
        for k in range(2):
            conv = net.op(
                f"u{i}_conv{k}", (last,), size, 40.0, saves=(last,), weight_nbytes=size // 8
            )
            last = net.op(f"u{i}_act{k}", (conv,), size, 4.0, saves=(conv,))
    loss = net.op("loss", (last,), 4, 1.0)
    return net.problem(loss)


def test_every_generator_gives_a_consistent_problem() -> None:
    """Chain, MLP, transformer and UNet construct without a ProblemError."""
    for problem in (chain(5), mlp(3), transformer(2), unet(3)):
        assert any(op.phase is Phase.BACKWARD for op in problem.ops)
