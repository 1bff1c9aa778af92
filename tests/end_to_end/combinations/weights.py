"""Ways to store a model's weights, as the libraries do it: each changes the linear layers of a diffusers model in place.

The quantisers are those of the libraries; their CPU paths run here, and the operators that their GPU paths put into a
graph are in tests/analysis/test_quantized_products.py. Only layers of the blocks are quantised, as pipelines do it:
what is sensitive (time embedding, projections in and out) stays as it is. Layerwise casting comes after LoRA, whose weights
would else be made in fp8.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.")
    ]


def plain(model: nn.Module) -> None:
    pass


def bf16(model: nn.Module) -> None:
    model.bfloat16()


def torchao_int8(model: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: (name, module) in _linears(model))


def torchao_fp8(model: nn.Module) -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(
        model, Float8WeightOnlyConfig(), lambda module, name: (name, module) in _linears(model)
    )


def bitsandbytes_nf4(model: nn.Module) -> None:
    import bitsandbytes as bnb

    for name, old in _linears(model):
        new = bnb.nn.Linear4bit(
            old.in_features, old.out_features, old.bias is not None, quant_type="nf4"
        )
        new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
        new.bias = old.bias
        model.set_submodule(name, new.to("cpu"))  # quantises
    return model.eval()


def bitsandbytes_int8(model: nn.Module) -> None:
    import bitsandbytes as bnb

    for name, old in _linears(model):
        new = bnb.nn.Linear8bitLt(
            old.in_features, old.out_features, old.bias is not None, has_fp16_weights=False
        )
        new.weight = bnb.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
        new.bias = old.bias
        model.set_submodule(name, new.to("cpu"))
    return model.eval()


def gguf(model: nn.Module) -> None:
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
    from gguf import GGMLQuantizationType, quants

    for name, old in _linears(model):
        new = GGUFLinear(
            old.in_features, old.out_features, old.bias is not None, compute_dtype=torch.float32
        )
        kind = GGMLQuantizationType.Q8_0
        data = torch.from_numpy(quants.quantize(old.weight.detach().numpy(), kind))
        new.weight = GGUFParameter(data, quant_type=kind)
        new.bias = old.bias
        model.set_submodule(name, new)
    return model.eval()


def layerwise_fp8(model: nn.Module) -> None:
    model.enable_layerwise_casting(  # type: ignore[operator]
        storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
    )


WEIGHTS: dict[str, Callable[[nn.Module], None]] = {
    "fp32": plain,
    "bf16": bf16,
    "torchao int8": torchao_int8,
    "torchao fp8": torchao_fp8,
    "bitsandbytes nf4": bitsandbytes_nf4,
    "bitsandbytes int8": bitsandbytes_int8,
    "GGUF Q8_0": gguf,
}
AFTER_LORA = {"layerwise fp8": layerwise_fp8}
