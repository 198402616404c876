"""What a user would take instead: transformers and torch on the CPU. Runs in a Python of its own.

Needs what `make peer` installs, and of this project nothing beyond this folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from experiments.benchmarks.worker import serve
from experiments.benchmarks.workloads import ATTENTION, BETAS, LEARNING_RATE, SHAPES, WEIGHT_DECAY, MoeShape

_MODELS: dict[str, Any] = {}


def prepare(task: str, **arguments: Any) -> Any:
    """See `worker.serve`."""
    return globals()[f"_{task}"](**arguments)


def _model(shape: str) -> Any:
    if shape not in _MODELS:
        torch.manual_seed(0)
        model = transformers.Ernie4_5_MoeForCausalLM(_config(SHAPES[shape]))
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "e_score" not in name:
                torch.nn.init.normal_(parameter, std=0.02)
        _MODELS[shape] = model
    return _MODELS[shape]


def _config(shape: MoeShape) -> Any:
    return transformers.Ernie4_5_MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        intermediate_size=shape.expert_width,
        moe_intermediate_size=shape.expert_width,
        moe_num_experts=shape.experts,
        moe_k=shape.top_k,
        moe_num_shared_experts=1,
        moe_layer_start_index=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )


def _tokens(shape: MoeShape, batch: int, length: int) -> torch.Tensor:
    generator = np.random.default_rng(batch * 1000 + length)
    return torch.from_numpy(generator.integers(100, shape.vocab_size, (batch, length)))


def _export(shape: str, out: str) -> dict[str, Any]:
    """Writes weights, tokens, logits, loss and gradients of one batch for `ours` to compare with."""
    model, tokens = _model(shape).train(), _tokens(SHAPES[shape], 2, 64)
    result = model(input_ids=tokens, labels=tokens, use_cache=False)
    result.loss.backward()
    layer = model.model.layers[0]
    gradients = {
        "text": model.model.embed_tokens.weight.grad,
        "query": layer.self_attn.q_proj.weight.grad,
        "experts": layer.mlp.experts.down_proj.grad,
    }
    arrays = {f"state/{name}": value for name, value in model.state_dict().items()}
    arrays |= {f"gradient/{name}": value for name, value in gradients.items()}
    arrays |= {"tokens": tokens, "logits": result.logits, "loss": result.loss}
    np.savez(Path(out), **{name: value.detach().numpy() for name, value in arrays.items()})
    model.zero_grad(set_to_none=True)
    return {"written": out}


def _train(shape: str) -> Any:
    model, sizes = _model(shape).train(), SHAPES[shape]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    tokens = _tokens(sizes, sizes.batch, sizes.length)

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def _prefill(shape: str, batch: int) -> Any:
    model, tokens = _model(shape).eval(), _tokens(SHAPES[shape], batch, 512)

    def prefill() -> None:
        with torch.inference_mode():
            model(input_ids=tokens, use_cache=True, logits_to_keep=1)

    return prefill


def _decode(shape: str, batch: int, best: bool = False) -> Any:
    """`generate()` with its default cache; `best`: static cache and compiled forward."""
    model, sizes = _model(shape).eval(), SHAPES[shape]
    if best and not hasattr(model, "compiled_for_benchmark"):
        model.forward = torch.compile(model.forward, dynamic=False)
        model.compiled_for_benchmark = True
    tokens = _tokens(sizes, batch, sizes.prompt)
    settings = {"cache_implementation": "static"} if best else {}

    def decode() -> None:
        with torch.inference_mode():
            out = model.generate(
                tokens,
                max_new_tokens=sizes.new_tokens,
                do_sample=False,
                attention_mask=torch.ones_like(tokens),
                pad_token_id=0,
                eos_token_id=None,
                **settings,
            )
        assert out.shape[1] == sizes.prompt + sizes.new_tokens

    return decode


def _attention(packed: bool) -> Any:
    """Forward and backward of `scaled_dot_product_attention`; packed documents need a dense mask."""
    size = ATTENTION
    shape = (1, size.heads, size.length, size.head_dim)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))  # it has no grouped queries on CPUs
    settings: dict[str, Any] = {"is_causal": True}
    if packed:
        document = torch.arange(size.length) // (size.length // size.documents)
        causal = torch.tril(torch.ones(size.length, size.length, dtype=torch.bool))
        settings = {"attn_mask": ((document[:, None] == document[None]) & causal)[None, None]}

    def both() -> None:
        functional.scaled_dot_product_attention(q, k, v, **settings).sum().backward()

    return both


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    serve(prepare)
