"""A modded DAC decoder with no state, written with torch's own convolutions, and random weights.

It is the independent statement of what the codec computes, over tensors by checkpoint name.
"""

import torch
from torch.nn import functional as F

from model.codec.checkpoint import Weights
from model.codec.dac import DacCodec


class _Recorder(Weights):
    """Makes a tensor of the shape asked for, instead of looking it up."""

    def __init__(self, seed):
        super().__init__({}, "recorder", torch.device("cpu"), torch.float32)
        self.generator = torch.Generator().manual_seed(seed)
        self.made = {}

    def take(self, name, *shape):
        noise = torch.randn(shape, generator=self.generator)
        if name.endswith(("alpha", "norm.weight")):
            tensor = 1 + 0.2 * noise
        elif name.endswith("gamma"):
            tensor = 0.5 + 0.1 * noise
        elif name.endswith("bias"):
            tensor = 0.1 * noise
        elif name.endswith("codebook.weight"):
            tensor = noise
        else:
            # Tame enough that nothing saturates: the samples peak near 0.5, as speech does.
            tensor = 0.5 * noise / torch.Size(shape[1:]).numel() ** 0.5
        self.made[self._prefix + name] = tensor
        return tensor


def make_tensors(config, seed):
    """Random tensors of every name that a codec of this configuration takes."""
    recorder = _Recorder(seed)
    DacCodec(config, recorder)
    return recorder.made


def reference_decode(config, tensors, codes):
    """codes i32 [B, K, T] -> f32 [B, T * frame_samples]."""
    w = tensors.__getitem__
    names = ["semantic_quantizer.quantizers.0"]
    names += [f"quantizer.quantizers.{i}" for i in range(config.num_codebooks - 1)]
    x = sum(
        F.conv1d(
            w(f"quantizer.{name}.codebook.weight")[codes[:, i].long()].transpose(1, 2),
            w(f"quantizer.{name}.out_proj.weight"),
            w(f"quantizer.{name}.out_proj.bias"),
        )
        for i, name in enumerate(names)
    )
    x = _transformer(config.post, w, "quantizer.post_module", x)
    for i, factor in enumerate(reversed(config.downsample_factors)):
        x = _transposed(w, f"quantizer.upsample.{i}.0.conv", x, factor)
        x = _convnext(w, f"quantizer.upsample.{i}.1", x)
    x = _conv(w, "decoder.model.0.conv", x)
    for i, rate in enumerate(config.decoder_rates):
        at = f"decoder.model.{i + 1}.block"
        x = _transposed(w, f"{at}.1.conv", _snake(w, f"{at}.0", x), rate)
        for j, dilation in enumerate((1, 3, 9)):
            unit = f"{at}.{j + 2}.block"
            y = _conv(w, f"{unit}.1.conv", _snake(w, f"{unit}.0", x), dilation)
            x = x + _conv(w, f"{unit}.3.conv", _snake(w, f"{unit}.2", y))
    last = len(config.decoder_rates) + 1
    x = _conv(w, f"decoder.model.{last + 1}.conv", _snake(w, f"decoder.model.{last}", x))
    return x[:, 0].tanh()


def _conv(w, name, x, dilation=1, groups=1):
    weight = w(f"{name}.weight")
    x = F.pad(x, ((weight.shape[2] - 1) * dilation, 0))
    return F.conv1d(x, weight, w(f"{name}.bias"), dilation=dilation, groups=groups)


def _transposed(w, name, x, stride):
    y = F.conv_transpose1d(x, w(f"{name}.weight"), w(f"{name}.bias"), stride=stride)
    return y[..., : x.shape[2] * stride]


def _snake(w, name, x):
    alpha = w(f"{name}.alpha")
    return x + torch.sin(alpha * x) ** 2 / (alpha + 1e-9)


def _convnext(w, name, x):
    y = _conv(w, f"{name}.dwconv.conv", x, groups=x.shape[1]).transpose(1, 2)
    y = F.layer_norm(y, y.shape[2:], w(f"{name}.norm.weight"), w(f"{name}.norm.bias"), 1e-6)
    y = F.gelu(F.linear(y, w(f"{name}.pwconv1.weight"), w(f"{name}.pwconv1.bias")))
    y = F.linear(y, w(f"{name}.pwconv2.weight"), w(f"{name}.pwconv2.bias")) * w(f"{name}.gamma")
    return x + y.transpose(1, 2)


def _rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _transformer(c, w, name, x):
    x = x.transpose(1, 2)
    num_steps = x.shape[1]
    frequencies = 1.0 / c.rope_base ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
    angles = torch.outer(torch.arange(num_steps).float(), frequencies)
    turn = torch.complex(angles.cos().bfloat16().float(), angles.sin().bfloat16().float())
    age = torch.arange(num_steps)[:, None] - torch.arange(num_steps)
    mask = (age >= 0) & (age < c.window)

    def heads(y):
        return y.unflatten(-1, (c.num_heads, c.head_dim)).transpose(1, 2)

    def rotated(y):
        pairs = torch.view_as_complex(heads(y).unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    for i in range(c.num_layers):
        at = f"{name}.layers.{i}"
        y = _rms(x, w(f"{at}.attention_norm.weight"), c.norm_eps)
        q, k, v = F.linear(y, w(f"{at}.attention.wqkv.weight")).chunk(3, -1)
        scores = rotated(q) @ rotated(k).transpose(-1, -2) / c.head_dim**0.5
        y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ heads(v)
        y = F.linear(y.transpose(1, 2).flatten(2), w(f"{at}.attention.wo.weight"))
        x = x + y * w(f"{at}.attention_layer_scale.gamma")
        y = _rms(x, w(f"{at}.ffn_norm.weight"), c.norm_eps)
        gate = F.silu(F.linear(y, w(f"{at}.feed_forward.w1.weight")))
        y = F.linear(gate * F.linear(y, w(f"{at}.feed_forward.w3.weight")),
                     w(f"{at}.feed_forward.w2.weight"))  # fmt: skip
        x = x + y * w(f"{at}.ffn_layer_scale.gamma")
    return _rms(x, w(f"{name}.norm.weight"), c.norm_eps).transpose(1, 2)
