"""A small modern GPT in one file.

RMSNorm before each sublayer, rotary positions, normalised queries and keys, SwiGLU, no biases, tied embedding and
output. Unlike in a usual GPT a row holds several documents: ``position_ids`` restarts at 0 with each span, and a
token attends only to its own span, so that the loss of a packed row is the loss of its documents.

Sources: RMSNorm arXiv:1910.07467; rotary positions arXiv:2104.09864; SwiGLU arXiv:2002.05202; normalised queries
and keys arXiv:2302.05442.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from batchloom.adapters.weighted_loss import sum_next_token_losses
from batchloom.core.fingerprint import derive_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn.attention.flex_attention import BlockMask

    from batchloom.train.train_settings import ModelSettings


def pad_vocabulary(size: int) -> int:
    """Round ``size`` up to a multiple of 64, which suits tensor cores."""
    return -(-size // 64) * 64


def compute_hidden_width(settings: ModelSettings) -> int:
    return settings.hidden or -(-8 * settings.width // 3 // 64) * 64


class RMSNorm(nn.Module):
    """RMS normalization with a learned gain, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to [..., width] float32."""
        return functional.rms_norm(x.float(), (x.shape[-1],), self.gain, 1e-6)


def make_rotary_table(position_ids: Tensor, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each [rows, 1, seq_len, head_width / 2] float32."""
    steps = torch.arange(0, head_width, 2, device=position_ids.device) / head_width
    angles = position_ids[:, None, :, None].float() * base**-steps
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [rows, heads, seq_len, head_width] by the angles of its positions."""
    cos, sin = table
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def make_attention_mask(position_ids: Tensor) -> Tensor:
    """Return the attention mask [rows, 1, seq_len, seq_len] bool, causal per span."""
    spans = (position_ids == 0).cumsum(1)
    same_span = spans[:, :, None] == spans[:, None, :]
    return same_span.tril_()[:, None]


def make_flex_mask(position_ids: Tensor) -> BlockMask:
    """Return the mask of :func:`make_attention_mask` for flex_attention."""
    from torch.nn.attention import flex_attention as flex

    spans = (position_ids == 0).cumsum(1)

    def allowed(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (spans[row, query] == spans[row, key]) & (query >= key)

    rows, seq_len = spans.shape
    return flex.create_block_mask(allowed, rows, None, seq_len, seq_len, device=spans.device)


def _get_flex_attention() -> Callable[..., Tensor]:
    """Return flex_attention to compile with the model, or compiled by itself.

    Uncompiled it builds the full score matrix.
    """
    from torch.nn.attention.flex_attention import flex_attention

    # The compiler warns about cached functions in what it compiles.
    if torch.compiler.is_compiling():
        return flex_attention
    return _compile_flex_attention()


@cache
def _compile_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


class SelfAttention(nn.Module):
    """Self-attention inside each span."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.qkv = nn.Linear(settings.width, 3 * settings.width, bias=False)
        self.out = nn.Linear(settings.width, settings.width, bias=False)
        self.norm_q = RMSNorm(settings.width // settings.heads)
        self.norm_k = RMSNorm(settings.width // settings.heads)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], mask: Tensor | BlockMask) -> Tensor:
        """Map [rows, seq_len, width] to the same shape."""
        rows, seq_len, width = x.shape
        qkv = self.qkv(x).view(rows, seq_len, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q = apply_rotary(self.norm_q(q), table).to(v.dtype)
        k = apply_rotary(self.norm_k(k), table).to(v.dtype)
        if isinstance(mask, Tensor):
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            mixed = _get_flex_attention()(q, k, v, block_mask=mask)
        output: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, seq_len, width))
        return output


class SwiGLU(nn.Module):
    """SwiGLU feed-forward layer: one half gates the other."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        hidden = compute_hidden_width(settings)
        self.up = nn.Linear(settings.width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, settings.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, seq_len, width] to the same shape."""
        gate, value = self.up(x).chunk(2, dim=-1)
        gated: Tensor = self.out(functional.silu(gate) * value)
        return gated


class TransformerLayer(nn.Module):
    """Transformer layer: attention, then SwiGLU, each with a residual connection."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.norm_attention = RMSNorm(settings.width)
        self.attention = SelfAttention(settings)
        self.norm_mlp = RMSNorm(settings.width)
        self.mlp = SwiGLU(settings)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], mask: Tensor | BlockMask) -> Tensor:
        """Map [rows, seq_len, width] to the same shape."""
        x = x + self.attention(self.norm_attention(x), table, mask)
        added: Tensor = x + self.mlp(self.norm_mlp(x))
        return added


class GPT(nn.Module):
    """GPT language model.

    Args:
        settings: shape of the model.
        vocab_size: rows of the embedding, including padding.
        seed: seed of the initial weights; the global generator is not used.
    """

    def __init__(self, settings: ModelSettings, vocab_size: int, seed: int = 0) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(vocab_size, settings.width)
        self.layers = nn.ModuleList(TransformerLayer(settings) for _ in range(settings.layers))
        self.norm = RMSNorm(settings.width)
        # torch uses 32 bits of a seed. Hashing makes every bit of a longer seed count.
        self._start(torch.Generator().manual_seed(derive_key("weights", seed)[0]))

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return self.embedding.num_embeddings

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding, under the name of transformers."""
        return self.embedding

    @property
    def description(self) -> str:
        """Short description of the model."""
        return f"{self.settings.layers} layers of width {self.settings.width}"

    @torch.no_grad()
    def _start(self, generator: torch.Generator) -> None:
        if self.embedding.weight.is_meta:
            # The weights have no values.
            return
        for name, weight in self.named_parameters():
            if name.endswith("out.weight"):
                # Zero output projections make each layer an identity at the start.
                weight.zero_()
            elif weight.dim() == 2:
                scale = 0.5 if weight is self.embedding.weight else 1.0
                weight.normal_(0.0, scale * weight.shape[1] ** -0.5, generator=generator)

    def logits(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the logits of every next token.

        Args:
            input_ids: [rows, seq_len] int64.
            position_ids: [rows, seq_len] int64, 0 at the start of each span.

        Returns:
            logits, [rows, seq_len, vocab_size].
        """
        mask = make_flex_mask(position_ids) if position_ids.is_cuda else make_attention_mask(position_ids)
        head_width = self.settings.width // self.settings.heads
        table = make_rotary_table(position_ids, head_width, self.settings.rotary_base)
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, table, mask)
        return functional.linear(self.norm(x), self.embedding.weight)

    def forward(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, loss_weights: Tensor | None = None
    ) -> Tensor:
        """Return the summed loss of the trained tokens in nats: a float32 scalar.

        ``labels`` [rows, seq_len] int64 are aligned with ``input_ids``, as for Hugging Face models, with -100 for
        tokens without loss. ``loss_weights`` [rows, seq_len] weight the loss of each label.
        """
        return sum_next_token_losses(self.logits(input_ids, position_ids), labels, loss_weights)
