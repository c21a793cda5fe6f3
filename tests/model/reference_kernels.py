"""Compares packed documents with each alone, with reference functions in place of the kernels of linear attention.

    PYTHONPATH=recipes .venv/bin/python tests/model/reference_kernels.py

The references compute one document at a time: so the program prints for which models transformers tells both where each begins.
"""

import contextlib
import importlib
import json
import sys
import types

import torch


def install() -> None:
    """Makes transformers find the packages fla and causal_conv1d. Before a model of these is imported."""

    def chunk_gated_delta_rule(
        query, key, value, g, beta, cu_seqlens=None, output_final_state=False, use_qk_l2norm_in_kernel=False, scale=None
    ):
        module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
        compute = module.torch_recurrent_gated_delta_rule.__wrapped__
        lengths = [query.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
        parts = zip(*(tensor.split(lengths, dim=1) for tensor in (query, key, value, g, beta)), strict=True)
        options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return torch.cat([compute(*part, **options)[0] for part in parts], dim=1), None

    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
        lengths = [x.shape[2]] if seq_idx is None else seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        padding, groups = weight.shape[1] - 1, len(weight)
        parts = [
            torch.nn.functional.conv1d(part, weight[:, None], bias, padding=padding, groups=groups)[:, :, : part.shape[2]]
            for part in x.split(lengths, dim=2)
        ]
        together = torch.cat(parts, dim=2)
        return torch.nn.functional.silu(together) if activation else together

    fla, conv = types.ModuleType("fla"), types.ModuleType("causal_conv1d")
    fla.ops = fla.gated_delta_rule = fla
    fla.chunk_gated_delta_rule = fla.fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
    conv.causal_conv1d_fn = conv.causal_conv1d_update = causal_conv1d_fn
    sys.modules |= dict.fromkeys(["fla", "fla.ops", "fla.ops.gated_delta_rule"], fla) | {"causal_conv1d": conv}


def main() -> None:
    install()
    from harness.model import attention

    import transformers

    attention.use_no_gpu_kernels = contextlib.nullcontext  # the references compute on a CPU
    transformers.logging.set_verbosity_error()
    found = {}
    for kind in attention.KEPT_APART_BY_KERNELS:
        found[kind] = attention.keeps_documents_apart(transformers.AutoConfig.for_model(kind), None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
