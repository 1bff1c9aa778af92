from __future__ import annotations

import pytest
import torch

from sta_compile.errors import StaError
from sta_compile.video_models import MODELS, build, latent_of, make_inputs, without_weights

SMALL = {
    "WanTransformer3DModel": {"num_layers": 1, "num_attention_heads": 2, "ffn_dim": 64},
    "HunyuanVideoTransformer3DModel": {
        "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 2,
    },
    "CogVideoXTransformer3DModel": {"num_layers": 1, "num_attention_heads": 2},
    "CosmosTransformer3DModel": {"num_layers": 1, "num_attention_heads": 2},
    "MochiTransformer3DModel": {"num_layers": 1, "num_attention_heads": 2},
    "LTXVideoTransformer3DModel": {"num_layers": 1},
    "AllegroTransformer3DModel": {"num_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_inputs_fit_the_model_and_the_output_has_the_latents_shape(name):
    with without_weights(name) as device:
        model = build(name, SMALL[name], device=device, dtype=torch.float32)
        inputs = make_inputs(model, (4, 16, 24), batch=2, device=device, dtype=torch.float32)
    if name == "MochiTransformer3DModel":  # reads values of its text mask
        model = build(name, SMALL[name], device="cpu", dtype=torch.float32)
        inputs = make_inputs(model, (4, 16, 24), batch=2, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        (out,) = model(**inputs)
    assert out.shape == inputs["hidden_states"].shape


@pytest.mark.parametrize(
    ("name", "video", "latent"),
    [
        ("WanTransformer3DModel", (81, 720, 1280), (21, 90, 160)),
        ("HunyuanVideoTransformer3DModel", (129, 720, 1280), (33, 90, 160)),
        ("CogVideoXTransformer3DModel", (49, 480, 720), (13, 60, 90)),
        ("MochiTransformer3DModel", (163, 480, 848), (28, 60, 106)),
        ("LTXVideoTransformer3DModel", (161, 512, 704), (21, 16, 22)),
        ("CosmosTransformer3DModel", (121, 704, 1280), (16, 88, 160)),
        ("AllegroTransformer3DModel", (88, 720, 1280), (22, 90, 160)),
    ],
)
def test_latents_of_the_usual_videos(name, video, latent):
    assert latent_of(name, *video) == latent


def test_mistakes_say_what_to_pass():
    with pytest.raises(StaError, match="pass one of Wan"):
        build("Nope")
    with pytest.raises(StaError, match="smaller than one latent; pass --size"):
        latent_of("WanTransformer3DModel", 81, 4, 4)
    with pytest.raises(StaError, match=r"num_layer.*constructor"):
        build("WanTransformer3DModel", {"num_layer": 1})
