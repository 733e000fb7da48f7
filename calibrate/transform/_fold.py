"""Moving a factor per channel from the inputs of linears into what makes those inputs, for every transform.

Inputs divided by s (K,) and weights multiplied by it give the same outputs: W x = (W s) (x / s). The division is folded
into the norm before, or into the rows and bias of an earlier linear. Two things keep the function the same to the last
bit that is stored:

- Norms and biases are stored in 16 bits, so norm / s is rounded first, to a value that bfloat16, float16 and float32
  all hold, and the linears get the factor that this leaves: s' = norm / rounded(norm / s). Likewise for a bias.
- A pair with a linear that is not quantized (a skipped one, a router) takes powers of two, which change no digit of
  the weights in any dtype.

A channel for which no such factor exists (1 + w next to zero, a value past the float16 range) stays as it was. Every
tensor keeps its dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from calibrate.inputs import InputStats
from qat.arch import Arch
from qat.artifact import COLUMNS, ROWS
from qat.quant import on_grid
from qat.scheme import Scheme, TensorFormat

FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class Pair:
    """One of `arch.norm_pairs` in one block, by full names.

    source: the norm, or the earlier linear. offset: of a norm that multiplies by offset + weight, or 0.
    consumers: every linear that reads it. formats, inputs: of those that are quantized and have statistics. exact:
    the factors must be powers of two. num_channels: N of the source. in_features: K of the consumers, N or, where query
    heads share a key-value head, a multiple of it. head_dim: channels of a head; channel (head, d) of the source feeds
    the inputs (head * K / N + any, d).
    """

    source: str
    is_norm: bool
    offset: float
    consumers: tuple[str, ...]
    formats: Mapping[str, TensorFormat]
    inputs: Mapping[str, InputStats]
    exact: bool
    num_channels: int
    in_features: int
    head_dim: int

    @property
    def stats(self) -> list[InputStats]:
        """Each of the objects in `inputs` once: linears that read one tensor share one."""
        return list({id(stats): stats for stats in self.inputs.values()}.values())

    def by_head(self, x: Tensor) -> Tensor:
        """Values of inputs (..., K) as (..., N / head_dim, heads that share, head_dim)."""
        return x.view(*x.shape[:-1], -1, self.in_features // self.num_channels, self.head_dim)

    def to_inputs(self, x: Tensor) -> Tensor:
        """Values of the source's channels (N,) for each input (K,)."""
        heads = x.view(-1, 1, self.head_dim)
        return heads.expand(-1, self.in_features // self.num_channels, -1).reshape(-1)


def pairs(
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, InputStats],
    arch: Arch,
    scheme: Scheme,
    config: PretrainedConfig,
) -> Iterator[Pair]:
    """The pairs of a block with a quantized consumer: those of norms first, so that replaying has one order.

    Raises ValueError for shapes that do not fit each other.
    """
    prefix = _prefix(weights, arch)
    order = {name: place for place, name in enumerate(arch.linears)}
    for local, after in sorted(arch.norm_pairs, key=lambda pair: order.get(pair[0], -1)):
        source, consumers = prefix + local, tuple(prefix + name for name in after)
        is_linear = local in order
        formats = {prefix + name: fmt for name in after if name in order and (fmt := scheme.format_of(prefix + name))}
        known = {name: fmt for name, fmt in formats.items() if name in inputs and inputs[name].num_tokens}
        if not known:
            continue
        exact = len(formats) < len(consumers) or (is_linear and scheme.format_of(source) is None)
        num_channels, in_features = len(weights[f"{source}.weight"]), weights[f"{consumers[0]}.weight"].shape[1]
        yield Pair(
            source,
            not is_linear,
            0.0 if is_linear else arch.norm_offset,
            consumers,
            known,
            {name: inputs[name] for name in known},
            exact,
            num_channels,
            in_features,
            _head_dim(source, num_channels, consumers[0], in_features, config),
        )


def _prefix(weights: Mapping[str, Tensor], arch: Arch) -> str:
    return f"{arch.blocks}.{arch.split(next(iter(weights)))[0]}."


def _head_dim(source: str, num_channels: int, consumer: str, in_features: int, config: PretrainedConfig) -> int:
    if num_channels == in_features:
        return num_channels
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if in_features % num_channels or num_channels % size:
        raise ValueError(
            f"{source} gives {num_channels} channels and {consumer} reads {in_features}, which heads of {size} "
            "channels (head_dim) cannot be shared out over; mend norm_pairs of the architecture, or the config"
        )
    return size


class Factors(NamedTuple):
    """Of the channels of a pair, (N,) float32: what its source's norm or bias is multiplied by, before it is rounded to
    16 bits; and what the rest of the source is divided by and its consumers are multiplied by."""

    stored: Tensor
    inputs: Tensor


def allowed(pair: Pair, weights: Mapping[str, Tensor], wanted: Tensor) -> Factors:
    """The factors next to `wanted` (N,), the consumers' float32, that can be stored; 1 where there is none."""
    one = torch.ones_like(wanted)
    s = torch.where(torch.isfinite(wanted) & (wanted > 0), wanted, one)
    s = torch.exp2(s.log2().round()) if pair.exact else s
    stored = 1 / s
    kept = torch.ones_like(s, dtype=torch.bool)
    if (vector := weights.get(f"{pair.source}.{'weight' if pair.is_norm else 'bias'}")) is not None:
        vector = vector.to(s.device)
        rounded = _rounded(vector, stored, pair.offset).float()
        old, new = pair.offset + vector.float(), pair.offset + rounded
        left = torch.where((old == 0) & (new == 0), s, old / new)
        kept &= (left == s) if pair.exact else (left > s / 2) & (left < s * 2)
        kept &= rounded.abs() <= FLOAT16_MAX
        s = left
    if pair.exact:
        if not pair.is_norm:
            kept &= _holds(weights[f"{pair.source}.weight"].to(s.device), 1 / s[:, None]).all(1)
        for name in pair.consumers:
            columns = _holds(weights[f"{name}.weight"].to(s.device), pair.to_inputs(s)).all(0)
            kept &= pair.by_head(columns).all(-2).flatten()
    return Factors(torch.where(kept, stored, one), torch.where(kept, s, one))


def _holds(x: Tensor, factor: Tensor) -> Tensor:
    """Where x times factor has a finite float16 form and takes no rounding in x's own dtype."""
    product = x.float() * factor
    return (product.abs() <= FLOAT16_MAX) & (product.to(x.dtype).float() == product)


def fold(pair: Pair, weights: dict[str, Tensor], factors: Factors) -> dict[str, Tensor]:
    """Multiply the tensors of a pair, bring the consumers' statistics in line, and return the vectors to replay it."""
    if bool((factors.inputs == 1).all()):
        return {}
    if pair.is_norm:
        assert f"{pair.source}.bias" not in weights, f"{pair.source} has a bias, which is not folded"
        vectors = {f"{pair.source}.weight": factors.stored}
    else:
        vectors = {f"{pair.source}.weight{ROWS}": 1 / factors.inputs}
        if f"{pair.source}.bias" in weights:
            vectors[f"{pair.source}.bias"] = factors.stored
    divisor = pair.to_inputs(factors.inputs)
    vectors |= {f"{name}.weight{COLUMNS}": divisor.clone() for name in pair.consumers}
    _multiply(weights, vectors, {f"{pair.source}.weight": pair.offset})
    for stats in pair.stats:
        stats.rescale(divisor)
    return vectors


def replay(weights: dict[str, Tensor], vectors: Mapping[str, Tensor], arch: Arch) -> None:
    """Do to a block of the parent what a transform did: give it the vectors that `rescale` returned.

    weights: of one block by full name, quantized linears in float32, the rest as stored; entries are replaced. The
    result equals what `rescale` left, bit for bit. Raises ValueError for a vector of a tensor that is not there.
    """
    if unknown := {name.partition("#")[0] for name in vectors} - weights.keys():
        raise ValueError(f"transform vectors of {', '.join(sorted(unknown))}, which this block does not have")
    prefix = _prefix(weights, arch)
    norms = [f"{prefix}{source}.weight" for source, _ in arch.norm_pairs if source not in arch.linears]
    _multiply(weights, vectors, dict.fromkeys(norms, arch.norm_offset))


def _multiply(weights: dict[str, Tensor], vectors: Mapping[str, Tensor], offsets: Mapping[str, float]) -> None:
    """offsets: of norms, by name. Rows last: a linear that gets both factors had its columns multiplied first."""
    for key in sorted(vectors, key=lambda key: key.endswith(ROWS)):
        name = key.removesuffix(ROWS).removesuffix(COLUMNS)
        tensor, vector = weights[name], vectors[key].to(weights[name].device)
        if name == key:
            weights[name] = _rounded(tensor, vector, offsets.get(name, 0.0))
        else:
            factor = vector[:, None] if key.endswith(ROWS) else vector
            weights[name] = (tensor.float() * factor).to(tensor.dtype)


def _rounded(vector: Tensor, factor: Tensor, offset: float) -> Tensor:
    """A norm or bias (N,) so that offset + it is `factor` (N,) times as much, rounded unless by a power of two."""
    value = (offset + vector.float()) * factor - offset
    is_power = torch.frexp(factor).mantissa == 0.5
    value = torch.where(is_power, value, on_grid(value))
    return torch.where(factor == 1, vector.float(), value).to(vector.dtype)
