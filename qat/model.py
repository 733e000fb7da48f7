"""A model that is never whole in memory: Hugging Face's own modules on the meta device, filled block by block.

`Model` runs the architecture's code from transformers. `block(i)` reads the weights of one decoder block from a
`Tensors` source and gives the module; leaving the context frees it. With `resident=True` blocks stay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from qat.arch import Arch, arch_of
from qat.checkpoint import IGNORED, Tensors
from qat.experts import split_experts

WAVE_BYTES = 256 * 2**20  # activations kept at once by `hidden`
Share = Callable[[float], Any]  # told the share of the blocks that a wave of activations has been through
STACKED = (".experts.gate_up_proj", ".experts.down_proj")


def skeleton(config: PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """transformers' model on the meta device, with one linear per expert and the module names of hub checkpoints.

    Writes the dtype into `config`. Raises ValueError for an unknown architecture, or an activation function or rotary
    embedding that transformers does not have.
    """
    arch = arch_of(config)
    try:
        with torch.device("meta"):
            root = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    except KeyError as error:
        raise ValueError(f"the config asks for {error}, which transformers does not have; correct the field") from error
    for index, block in enumerate(root.get_submodule(arch.blocks)):
        split_experts(block, arch.at(index))
    return root.requires_grad_(False)


def refuse_stacked(arch: Arch, names: Iterable[str]) -> None:
    """Raise ValueError when a checkpoint holds all experts of a block in one tensor."""
    stacked = min((name for name in names if name.endswith(STACKED)), default=None)
    if arch.experts and stacked:
        raise ValueError(
            f"{stacked} holds the experts stacked, as transformers computes with them; hub checkpoints and engines "
            "have them one by one: save the model with save_pretrained(folder, save_original_format=True)"
        )


class _Recorder(nn.Module):
    """Stands in for a decoder block and keeps the keyword arguments it is called with."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(block, "attention_type", None)
        self.kwargs: dict[str, Any] = {}

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert not args, "decoder blocks are called with keywords"
        self.kwargs = kwargs
        return hidden


class Model:
    """A causal language model as embedding, blocks and head, each loaded when needed.

    config: of transformers. tensors: the weights. dtype: of the computation; parameters are cast to it. prepare: called
    with the block's index and module after its weights are in (to add hooks). Raises ValueError for an unknown
    architecture, a missing tensor or a wrong shape.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        tensors: Tensors,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        resident: bool = False,
        prepare: Callable[[int, nn.Module], None] | None = None,
    ) -> None:
        config = copy.deepcopy(config)  # from_config writes the dtype into it
        self.config, self.tensors, self.device, self.dtype = config, tensors, torch.device(device), dtype
        self.resident, self.prepare = resident, prepare
        self.arch: Arch = arch_of(config)
        self.root = skeleton(config, dtype)
        self.blocks: Sequence[nn.Module] = list(self.root.get_submodule(self.arch.blocks))
        # buffers that no file holds (rotary frequencies) cannot stay on meta: build that module for real
        rotary = self.root.get_submodule(self.arch.rotary)
        self._set(self.arch.rotary, type(rotary)(config=config).to(self.device))
        self._names = {name for name in tensors.names() if not name.endswith(IGNORED)}
        self._block_names = self._by_block()
        refuse_stacked(self.arch, self._names)
        self._kwargs: dict[int, list[dict[str, Any]]] = {}
        self._tied = bool(getattr(config, "tie_word_embeddings", False))
        if self._tied and f"{self.arch.head}.weight" in self._names:
            same = torch.equal(tensors.get(f"{self.arch.head}.weight"), tensors.get(f"{self.arch.embed}.weight"))
            if not same:
                raise ValueError(
                    f"tie_word_embeddings is true, yet {self.arch.head}.weight differs from {self.arch.embed}.weight: "
                    "engines disagree on what that means; set the flag to false or drop the tensor"
                )

    @property
    def in_features(self) -> dict[str, int]:
        """Inputs of every linear of the blocks, by full name, in the order they run."""
        names = (name for index in range(len(self.blocks)) for name in self.arch.block_linears(index))
        return {name: int(self.root.get_submodule(name).in_features) for name in names}

    def _by_block(self) -> list[list[str]]:
        found: list[list[str]] = [[] for _ in self.blocks]
        for name in self._names:
            if name.startswith(self.arch.blocks + "."):
                index, _, rest = name[len(self.arch.blocks) + 1 :].partition(".")
                if index.isdigit() and int(index) < len(found):
                    found[int(index)].append(rest)
        return found

    def _set(self, path: str, module: nn.Module) -> None:
        parent, _, leaf = path.rpartition(".")
        setattr(self.root.get_submodule(parent), leaf, module)

    def _fill(self, module: nn.Module, prefix: str, names: list[str]) -> None:
        """Put the tensors prefix.name into a meta module. A bias the architecture does not declare is added."""
        state = {}
        for name in names:
            value = self.tensors.get(f"{prefix}.{name}").to(self.device, self.dtype)
            owner, _, leaf = name.rpartition(".")
            try:
                linear = module.get_submodule(owner)
            except AttributeError as error:
                raise ValueError(f"{type(module).__name__} has no place for the tensor {prefix}.{name}") from error
            if leaf == "bias" and isinstance(linear, nn.Linear) and linear.bias is None:
                linear.register_parameter("bias", nn.Parameter(torch.empty_like(value, device="meta"), False))
            state[name] = value
        try:
            module.load_state_dict(state, assign=True, strict=True)
        except RuntimeError as error:
            raise ValueError(f"the weights of {prefix} do not fit {type(module).__name__}: {error}") from error
        module.requires_grad_(False)

    def _compute_buffers(self, module: nn.Module) -> None:
        """Fill buffers that no file holds (Gemma's embedding scale), as transformers does after loading."""
        for owner in module.modules():
            missing = {name: buffer for name, buffer in owner.named_buffers(recurse=False) if buffer.is_meta}
            for name, buffer in missing.items():
                owner._buffers[name] = torch.empty_like(buffer, device=self.device)
            if missing:
                self.root._init_weights(owner)  # parameters are still on meta, where this does nothing

    def load_block(self, index: int) -> nn.Module:
        """The block with its weights in; call `free_block` when done with it, or use `block`."""
        module = self.blocks[index]
        if next(module.parameters()).is_meta:
            self._fill(module, f"{self.arch.blocks}.{index}", self._block_names[index])
            if self.prepare:
                self.prepare(index, module)
        return module

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        module = self.load_block(index)
        try:
            yield module
        finally:
            if not self.resident:
                module.to("meta")

    @contextmanager
    def ends(self) -> Iterator[None]:
        """Embedding, final norm and head with their weights in."""
        for path in (self.arch.embed, self.arch.norm, self.arch.head):
            module = self.root.get_submodule(path)
            if not next(module.parameters()).is_meta:
                continue
            self._compute_buffers(module)
            if path == self.arch.head and self._tied:
                module.weight = self.root.get_submodule(self.arch.embed).weight
                continue
            self._fill(module, path, [n[len(path) + 1 :] for n in self._names if n.startswith(path + ".")])
        try:
            yield
        finally:
            if not self.resident:
                for path in (self.arch.embed, self.arch.norm, self.arch.head):
                    self.root.get_submodule(path).to("meta")

    def kwargs(self, length: int) -> list[dict[str, Any]]:
        """What transformers passes to each block for sequences of `length` tokens without padding (masks, rotary)."""
        if length not in self._kwargs:
            inner = self.root.get_submodule(self.arch.blocks.rpartition(".")[0])
            leaf, norm_leaf = self.arch.blocks.rpartition(".")[2], self.arch.norm.rpartition(".")[2]
            recorders = nn.ModuleList([_Recorder(block) for block in self.blocks])
            layers, norm = getattr(inner, leaf), getattr(inner, norm_leaf)
            setattr(inner, leaf, recorders)
            setattr(inner, norm_leaf, nn.Identity())
            try:
                zeros = torch.zeros(1, length, self.config.hidden_size, device=self.device, dtype=self.dtype)
                with torch.no_grad():
                    inner(inputs_embeds=zeros, use_cache=False)
            finally:
                setattr(inner, leaf, layers)
                setattr(inner, norm_leaf, norm)
            self._kwargs[length] = [r.kwargs for r in recorders]  # type: ignore[misc]
        return self._kwargs[length]

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings (batch, length, hidden) of token ids. Inside `ends()`."""
        return self.root.get_submodule(self.arch.embed)(ids.to(self.device))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., vocabulary) in float32 of the last block's output. Inside `ends()`."""
        logits: Tensor = self.root.get_submodule(self.arch.head)(self.root.get_submodule(self.arch.norm)(hidden))
        cap = getattr(self.config, "final_logit_softcapping", None)
        return (torch.tanh(logits / cap) * cap if cap else logits).float()

    def run_block(self, index: int, hidden: Tensor, **extra: Any) -> Tensor:
        """One loaded block on (batch, length, hidden). extra: keyword arguments of the block beside the usual ones."""
        return self.blocks[index](hidden, **(self.kwargs(hidden.shape[1])[index] | extra))

    @torch.no_grad()
    def through(self, states: list[Tensor], progress: Share | None = None) -> list[Tensor]:
        """Hidden states (batch, length, hidden) after all blocks, each of which is read once."""
        for index in range(len(self.blocks)):
            with self.block(index):
                states = [self.run_block(index, state) for state in states]
            if progress:
                progress((index + 1) / len(self.blocks))
        return states

    def hidden(self, windows: Tensor, batch: int = 8, progress: Share | None = None) -> Iterator[Tensor]:
        """The last block's output (1, length, hidden) of each window of ids (num_windows, length), streamed by block.

        Windows go through together in waves of at most WAVE_BYTES of activations, so each block is read once a wave.
        """
        one = windows.shape[1] * self.config.hidden_size * torch.finfo(self.dtype).bits // 8
        per_wave = max(1, WAVE_BYTES // one)
        for start in range(0, len(windows), per_wave):
            with self.ends():
                states = [self.embed(ids) for ids in windows[start : start + per_wave].split(batch)]
            for state in self.through(states, progress):
                yield from state.split(1)
