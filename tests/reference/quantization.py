"""Our reader and our maker of quantised weights against the packages that the formats come from.

Each row packs on one side and unpacks on both: values, zero points, scales and dequantised weights, bit for bit.

    make reference-quantization

makes an environment for the packages, some 3 GB in .venv-reference, and runs this in it. By hand, with that
environment's Python: `PYTHONPATH=. python tests/reference/quantization.py`. It needs no GPU. Exits 1 if anything
differs, or if nothing could be compared; a package that cannot be imported is told.
"""

# N output channels, K input channels, G groups that share a scale

import importlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from actors.quantization.checkpoint import quantized_checkpoint
from actors.quantization.formats import QUANTIZE_NAMES, read_format
from actors.quantization.making import gptq_zeros, quantizer
from actors.quantization.packing import dequantized, repack, unpack_int4

NAME = "model.layers.0.mlp.up_proj"  # of a projection that all recipes quantise
SHAPES = ((64, 256), (96, 384), (160, 640), (384, 128))  # N, K
BLOCKED = ((128, 256), (256, 384), (384, 128))  # whole blocks, which transformers asks for
RAGGED = ((200, 352), (96, 160))  # the last blocks cut short

Stored = dict[str, Tensor]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Weights:
    """What a side makes of stored tensors; None: it does not tell.

    Attributes:
        values: as they are stored, from 0 on; of FP8, its bytes.
    """

    dequantised: Tensor  # [N, K]
    values: Tensor | None = None  # [N, K]
    zeros: Tensor | None = None  # [N, K]: each weight's
    scales: Tensor | None = None  # [N, K]: likewise


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        differing: weights whose part is not the same, by the part.
        note: instead of a comparison, or beside it.
    """

    package: str
    what: str
    shape: tuple[int, int]
    direction: str
    differing: Mapping[str, int]
    note: str = ""


# --- our side ---


def read(stored: Stored, config: Config, dtype: torch.dtype) -> Weights:
    """By way of a file, as a checkpoint is read.

    Raises:
        ValueError: it is refused.
    """
    with TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        tensors = {f"{NAME}.{leaf}": tensor.contiguous() for leaf, tensor in stored.items()}
        save_file(tensors, file)
        found = quantized_checkpoint(read_format(dict(config)), [file])
        projection = found.projections[NAME]
        with safe_open(file, framework="pt") as opened:
            parts = {leaf: opened.get_tensor(f"{NAME}.{leaf}") for leaf in projection.tensors}
        ours = repack(projection, parts, dtype)
    scheme = projection.scheme
    weight, zeros, order = ours["weight"], ours.get("zeros"), ours.get("order")
    values = weight.view(torch.uint8)
    if scheme.kind == "int4":
        values = unpack_int4(weight, scheme)
    N, K = values.shape

    def spread(each_GR: Tensor) -> Tensor:
        by_row = each_GR.T.repeat_interleave(min(scheme.rows, N), 0)[:N]
        return by_row.repeat_interleave(min(scheme.group, K), 1)[:, :K]

    def in_own_order(each_NK: Tensor) -> Tensor:
        return each_NK if order is None else each_NK[:, torch.argsort(order)]

    implied = torch.full((N, K), 8 if scheme.kind == "int4" else 128, dtype=torch.uint8)
    return Weights(
        dequantized(weight, ours["scales"], zeros, order, scheme, dtype),
        in_own_order(values),
        None if scheme.kind == "fp8" else in_own_order(implied if zeros is None else spread(zeros)),
        in_own_order(spread(ours["scales"])),
    )


def differing(ours: Weights, theirs: Weights) -> dict[str, int]:
    found = {}
    for part in ("values", "zeros", "scales", "dequantised"):
        one, other = getattr(ours, part), getattr(theirs, part)
        if one is None or other is None:
            continue
        other = other.expand(one.shape)
        # Floats by their bits, but for the sign of a zero, which no product shows.
        same = one == other if one.dtype == other.dtype else one.double() == other.double()
        found[part] = int((~same).sum())
    return found


def agree(
    package: str,
    what: str,
    direction: str,
    stored: Stored,
    config: Config,
    *theirs: Weights,
    dtype: torch.dtype = torch.float16,
) -> Row:
    """Ours against what the package reads, and against what was packed."""
    shape = (theirs[0].dequantised.shape[0], theirs[0].dequantised.shape[1])
    try:
        ours = read(stored, config, dtype)
    except ValueError as exc:
        return Row(package, what, shape, direction, {"refused": shape[0] * shape[1]}, str(exc))
    found: dict[str, int] = {}
    for each in theirs:
        for part, count in differing(ours, each).items():
            found[part] = found.get(part, 0) + count
    return Row(package, what, shape, direction, found)


def refused(package: str, what: str, stored: Stored, config: Config) -> Row:
    """A row for what the package writes and we must not read."""
    try:
        weights = read(stored, config, torch.bfloat16)
    except ValueError as exc:
        return Row(package, what, (0, 0), "theirs refused", {"refusal": 0}, str(exc))
    return Row(
        package,
        what,
        (0, 0),
        "theirs refused",
        {"read": weights.dequantised.numel()},
        "was not refused",
    )


# --- what is packed ---


@dataclass(frozen=True)
class Drawn:
    """Random values and what they stand for."""

    values: Tensor  # [N, K], from 0 on
    zeros: Tensor  # [N, G]
    scales: Tensor  # [N, G]
    groups: Tensor  # [K]: the group of each input channel

    @property
    def scale_each(self) -> Tensor:
        return self.scales[:, self.groups.long()]

    @property
    def zero_each(self) -> Tensor:
        return self.zeros[:, self.groups.long()]

    @property
    def exact(self) -> Tensor:
        """In float32, where it is exact."""
        return (self.values - self.zero_each).float() * self.scale_each.float()

    def weights(self, dtype: torch.dtype) -> Weights:
        return Weights(self.exact.to(dtype), self.values, self.zero_each, self.scale_each)


def draw(
    N: int,
    K: int,
    bits: int,
    group: int,
    symmetric: bool,
    ordered: bool = False,
    dtype: torch.dtype = torch.float16,
    least_zero: int = 0,
) -> Drawn:
    random = torch.Generator().manual_seed(N * 7919 + K * 31 + bits + group)
    size = K if group == -1 else group
    top, G = 2**bits - 1, K // size
    values = torch.randint(0, top + 1, (N, K), generator=random, dtype=torch.int32)
    zeros = torch.full((N, G), 2 ** (bits - 1), dtype=torch.int32)
    if not symmetric:
        zeros = torch.randint(least_zero, top + 1, (N, G), generator=random, dtype=torch.int32)
        zeros[::5] = least_zero  # borrows from its neighbour where one is taken from all
        zeros[3::11] = top
    scales = (torch.rand((N, G), generator=random) * 0.02 + 0.001).to(dtype)
    groups = torch.arange(K, dtype=torch.int32) // size
    if ordered:
        groups = groups[torch.randperm(K, generator=random)]
    return Drawn(values, zeros, scales, groups)


def normal(N: int, K: int) -> Tensor:
    random = torch.Generator().manual_seed(N * K)
    return torch.randn((N, K), generator=random) * 0.05


def linear(weight_NK: Tensor) -> torch.nn.Linear:
    N, K = weight_NK.shape
    module = torch.nn.Linear(K, N, bias=False)
    module.weight.data = weight_NK
    return module


def recipes(method: str) -> Iterator[tuple[str, Config, tuple[int, int], Stored]]:
    """What our maker packs, of the recipes of a `quant_method`."""
    for name in QUANTIZE_NAMES:
        maker = quantizer(name)
        if maker.config["quant_method"] != method:
            continue
        for N, K in SHAPES:
            yield name, maker.config, (N, K), maker.quantize(NAME, normal(N, K))


# --- GPTQ ---

GPTQ = tuple(itertools.product((4, 8), (32, 64, 128, -1), (True, False), (False, True)))


def gptq_config(bits: int, group: int, sym: bool, desc_act: bool, form: str) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": sym,
        "desc_act": desc_act,
        "checkpoint_format": form,
    }


def gptq_words(bits: int, group: int, sym: bool, desc_act: bool, form: str) -> str:
    scale = "channel" if group == -1 else str(group)
    return " ".join(
        (form, f"int{bits}", scale, "sym" if sym else "asym", *(["desc_act"] if desc_act else []))
    )


def by_values(weights: Callable[[Stored], Tensor], stored: Stored, groups_K: Tensor) -> Weights:
    """What a package that only dequantises has read: with scales of 1, also with values of 0.

    Args:
        weights: of stored tensors, [N, K].
    """
    ones = torch.ones_like(stored["scales"])
    zeros = -weights({**stored, "scales": ones, "qweight": torch.zeros_like(stored["qweight"])})
    values = weights({**stored, "scales": ones}) + zeros
    scales = stored["scales"].T[:, groups_K.long()]
    return Weights(weights(stored), values, zeros, scales)


def gptqmodel_gptq() -> Iterator[Row]:
    package = f"gptqmodel {version('gptqmodel')}"
    torch_linear = importlib.import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    utils = importlib.import_module("gptqmodel.utils.model")

    def module_of(
        N: int, K: int, bits: int, group: int, sym: bool, desc_act: bool
    ) -> torch.nn.Module:
        made = torch_linear(
            bits=bits,
            group_size=group,
            sym=sym,
            desc_act=desc_act,
            in_features=K,
            out_features=N,
            bias=False,
            register_buffers=True,
        )
        assert isinstance(made, torch.nn.Module)
        return made.eval()

    def weights_of(stored: Stored, like: tuple[Any, ...], form: str) -> Tensor:
        """Dequantised by the package."""
        module: Any = module_of(*like)
        for leaf in ("qweight", "qzeros", "scales", "g_idx"):
            module.register_buffer(leaf, stored[leaf].clone())
        if form == "gptq":
            utils.convert_gptq_v1_to_v2_format_module(module, module.bits, torch.int32)
        found: Tensor = module.dequantize_weight().T
        return found

    for (N, K), (bits, group, sym, desc_act) in itertools.product(SHAPES, GPTQ):
        if K % (K if group == -1 else group):
            continue
        drawn = draw(N, K, bits, group, sym, desc_act)
        like = (N, K, bits, group, sym, desc_act)
        for form in ("gptq", "gptq_v2"):
            module: Any = module_of(*like)
            module.pack_original(
                linear(drawn.exact), drawn.scales.float(), drawn.zeros.float(), drawn.groups
            )
            if form == "gptq":
                settings = SimpleNamespace(bits=bits, pack_dtype=torch.int32)
                utils.convert_gptq_v2_to_v1_format_module(module, settings)
            stored = {
                leaf: getattr(module, leaf).clone()
                for leaf in ("qweight", "qzeros", "scales", "g_idx")
            }
            theirs = by_values(partial(weights_of, like=like, form=form), stored, drawn.groups)
            yield agree(
                package,
                gptq_words(bits, group, sym, desc_act, form),
                "theirs",
                stored,
                gptq_config(bits, group, sym, desc_act, form),
                theirs,
                drawn.weights(torch.float16),
            )
    for name, config, (N, K), stored in recipes("gptq"):
        form = config["checkpoint_format"]
        like = (N, K, config["bits"], config["group_size"], config["sym"], config["desc_act"])
        theirs = by_values(partial(weights_of, like=like, form=form), stored, stored["g_idx"])
        yield agree(package, name, "ours", stored, config, theirs)

    # Files of the second format whose configuration says the first.
    drawn = draw(64, 256, 4, 128, symmetric=True)
    module = module_of(64, 256, 4, 128, True, False)
    module.pack_original(linear(drawn.exact), drawn.scales.float(), drawn.zeros.float(), None)
    stored = {leaf: getattr(module, leaf) for leaf in ("qweight", "qzeros", "scales", "g_idx")}
    config = gptq_config(4, 128, True, False, "gptq")
    yield refused(package, "gptq_v2 sym, called gptq", stored, config)
    stored["qzeros"] = gptq_zeros(drawn.zeros.T, 4, "gptq")
    config = gptq_config(4, 128, True, False, "gptq_v2")
    yield refused(package, "gptq sym, called gptq_v2", stored, config)


def autogptq() -> Iterator[Row]:
    package = f"auto-gptq {version('auto-gptq')}"
    _without_init("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    quant_linear = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear

    def weights_of(stored: Stored, bits: int, group: int) -> Tensor:
        """Of a product with the identity, in which each sum has one term that is not 0."""
        K, N = len(stored["g_idx"]), stored["qweight"].shape[1]
        module: Any = quant_linear(bits, group, K, N, False)
        for leaf, tensor in stored.items():
            module.register_buffer(leaf, tensor.clone())
        found: Tensor = module(torch.eye(K, dtype=torch.float16)).T
        return found

    for (N, K), (bits, group, sym, desc_act) in itertools.product(SHAPES, GPTQ):
        if K % (K if group == -1 else group):
            continue
        # From a zero point of 0 it takes 1 as well, and writes the 32 bits of -1 over its neighbours.
        drawn = draw(N, K, bits, group, sym, desc_act, least_zero=1)
        module: Any = quant_linear(bits, group, K, N, False, weight_dtype=torch.float16)
        module.pack(
            linear(drawn.exact), drawn.scales.float(), drawn.zeros.float(), drawn.groups.clone()
        )
        stored = {leaf: getattr(module, leaf) for leaf in ("qweight", "qzeros", "g_idx")}
        stored["scales"] = module.scales.half()
        theirs = by_values(partial(weights_of, bits=bits, group=group), stored, drawn.groups)
        yield agree(
            package,
            gptq_words(bits, group, sym, desc_act, "gptq"),
            "theirs",
            stored,
            gptq_config(bits, group, sym, desc_act, "gptq"),
            theirs,
            drawn.weights(torch.float16),
        )
    for name, config, _, stored in recipes("gptq"):
        bits, group = config["bits"], config["group_size"]
        if config["checkpoint_format"] != "gptq" or not config["sym"]:
            continue  # it reads zero points of 0 as 16
        theirs = by_values(partial(weights_of, bits=bits, group=group), stored, stored["g_idx"])
        yield agree(package, name, "ours", stored, config, theirs)


# --- AWQ ---


def awq_config(group: int) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
    }


def awq_rows(
    package: str, pack: Callable[[Drawn, int], Stored], weights_of: Callable[..., Tensor]
) -> Iterator[Row]:
    for (N, K), group in itertools.product(SHAPES, (32, 64, 128, -1)):
        if K % (size := K if group == -1 else group):
            continue
        drawn = draw(N, K, 4, group, symmetric=False)
        stored = pack(drawn, group)
        theirs = by_values(partial(weights_of, size=size), stored, drawn.groups)
        what = f"gemm int4 {'channel' if group == -1 else group}"
        expected = drawn.weights(torch.float16)
        yield agree(package, what, "theirs", stored, awq_config(group), theirs, expected)
    for name, config, (_, K), stored in recipes("awq"):
        size = config["group_size"]
        theirs = by_values(partial(weights_of, size=size), stored, torch.arange(K) // size)
        yield agree(package, name, "ours", stored, config, theirs)


def autoawq() -> Iterator[Row]:
    package = f"autoawq {version('autoawq')}"
    _without_init("awq", "awq.modules", "awq.modules.linear", "awq.utils")
    gemm = importlib.import_module("awq.modules.linear.gemm").WQLinear_GEMM
    dequantize = importlib.import_module("awq.utils.packing_utils").dequantize_gemm

    def pack(drawn: Drawn, group: int) -> Stored:
        size = drawn.values.shape[1] if group == -1 else group
        module = gemm.from_linear(
            linear(drawn.exact),
            4,
            size,
            scales=drawn.scales.float().T.contiguous(),
            zeros=drawn.zeros.float().T.contiguous(),
        )
        return {leaf: getattr(module, leaf) for leaf in ("qweight", "qzeros", "scales")}

    def weights_of(stored: Stored, size: int) -> Tensor:
        parts = stored["qweight"], stored["qzeros"], stored["scales"]
        found: Tensor = dequantize(*parts, 4, size).T
        return found

    yield from awq_rows(package, pack, weights_of)


def gptqmodel_awq() -> Iterator[Row]:
    package = f"gptqmodel {version('gptqmodel')}"
    awq_linear = importlib.import_module("gptqmodel.nn_modules.qlinear.torch_awq").AwqTorchLinear
    utils = importlib.import_module("gptqmodel.quantization.awq.utils.packing_utils")

    def pack(drawn: Drawn, group: int) -> Stored:
        N, K = drawn.values.shape
        module: Any = awq_linear(
            bits=4, group_size=group, sym=False, desc_act=False, in_features=K, out_features=N
        )
        module.pack(linear(drawn.exact), drawn.scales.float(), drawn.zeros.float())
        return {leaf: getattr(module, leaf) for leaf in ("qweight", "qzeros", "scales")}

    def weights_of(stored: Stored, size: int) -> Tensor:
        parts = {leaf: stored[leaf] for leaf in ("qweight", "qzeros", "scales")}
        found: Tensor = utils.dequantize_gemm(**parts, bits=4, group_size=size).T
        return found

    yield from awq_rows(package, pack, weights_of)


# --- compressed-tensors ---


def ct_config(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


def ct_integers() -> Iterator[tuple[str, int, int, bool, bool]]:
    """Form, bits, group, whether symmetric, whether the channels are in another order."""
    for size, sym, bits in itertools.product((32, 64, 128, -1), (True, False), (4, 8)):
        yield "pack-quantized", bits, size, sym, False
        if size != -1:
            yield "pack-quantized", bits, size, sym, True
        if bits == 8:
            yield "int-quantized", bits, size, sym, False
            yield "naive-quantized", bits, size, sym, False


CT_INTEGERS = tuple(ct_integers())


def compressed_tensors() -> Iterator[Row]:
    package = f"compressed-tensors {version('compressed-tensors')}"
    base = importlib.import_module("compressed_tensors.compressors").BaseCompressor
    helpers = importlib.import_module("compressed_tensors.compressors.pack_quantized.helpers")
    quantization = importlib.import_module("compressed_tensors.quantization")
    forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")

    def scheme_of(config: Config) -> Any:
        group = config["config_groups"]["group_0"]
        arguments = quantization.QuantizationArgs(**group["weights"])
        return quantization.QuantizationScheme(targets=["Linear"], weights=arguments)

    def theirs_of(stored: Stored, config: Config) -> Weights:
        scheme = scheme_of(config)
        args = scheme.weights
        if "weight_packed" in stored:
            codec = base.get_value_from_registry(config["format"])
            weight = codec.decompress(dict(stored), scheme)["weight"]
        else:
            # Its `decompress` guesses the strategy by the shape of the scales.
            zeros = stored.get("weight_zero_point")
            weight = forward.dequantize(stored["weight"], stored["weight_scale"], zeros, args)
        if args.type == "float":
            return Weights(weight, stored["weight"].view(torch.uint8))
        half = 2 ** (args.num_bits - 1)
        if "weight_packed" in stored:
            shape = torch.Size(stored["weight_shape"].tolist())
            signed = helpers.unpack_from_int32(stored["weight_packed"], args.num_bits, shape)
        else:
            signed = stored["weight"]
        return Weights(weight, signed.to(torch.int32) + half)

    for dtype, (N, K), case in itertools.product(
        (torch.bfloat16, torch.float16), SHAPES, CT_INTEGERS
    ):
        form, bits, size, sym, ordered = case
        if K % (K if size == -1 else size):
            continue
        drawn = draw(N, K, bits, size, sym, ordered, dtype)
        weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "channel"}
        if size != -1:
            weights |= {"strategy": "group", "group_size": size}
        if ordered:
            weights["actorder"] = "group"
        config = ct_config(form, weights)
        # Quotients by scales of 16 bits would be of 16 bits, and not the values again.
        state = {"weight": drawn.exact, "weight_scale": drawn.scales.float()}
        if not sym:
            state["weight_zero_point"] = (drawn.zeros - 2 ** (bits - 1)).to(torch.int8)
        if ordered:
            state["weight_g_idx"] = drawn.groups
        stored = base.get_value_from_registry(form).compress(state, scheme_of(config))
        stored["weight_scale"] = drawn.scales
        sharing = "channel" if size == -1 else str(size)
        words = [form, f"int{bits}", sharing, "sym" if sym else "asym", str(dtype)[6:]]
        yield agree(
            package,
            " ".join([*words, "g_idx"] if ordered else words),
            "theirs",
            stored,
            config,
            theirs_of(stored, config),
            drawn.weights(dtype),
            dtype=dtype,
        )
    for form, (N, K) in itertools.product(("float-quantized", "naive-quantized"), BLOCKED + RAGGED):
        for strategy, (rows, columns) in {
            "tensor": (N, K),
            "channel": (1, K),
            "block": (128, 128),
        }.items():
            dense = normal(N, K)
            most = block_most(dense, rows, columns)
            scale = (most / 448).to(torch.bfloat16)
            args: dict[str, Any] = {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": strategy,
            }
            if strategy == "tensor":
                scale = scale.reshape(1)
            if strategy == "block":
                args["block_structure"] = [rows, columns]
            config = ct_config(form, args)
            codec = base.get_value_from_registry(form)
            state = {"weight": dense.bfloat16(), "weight_scale": scale}
            stored = codec.compress(state, scheme_of(config))
            yield agree(
                package,
                f"{form} fp8 {strategy}",
                "theirs",
                stored,
                config,
                theirs_of(stored, config),
                dtype=torch.bfloat16,
            )
    for name, made, _, stored in recipes("compressed-tensors"):
        theirs = theirs_of(stored, made)
        yield agree(package, name, "ours", stored, made, theirs, dtype=torch.bfloat16)


def block_most(weight_NK: Tensor, rows: int, columns: int) -> Tensor:
    """The largest size in each block."""
    N, K = weight_NK.shape
    whole = weight_NK.new_zeros(-(-N // rows) * rows, -(-K // columns) * columns)
    whole[:N, :K] = weight_NK.abs()
    return whole.view(-(-N // rows), rows, -(-K // columns), columns).amax((1, 3))


# --- FP8 ---


def transformers_fp8() -> Iterator[Row]:
    package = f"transformers {version('transformers')}"
    fp8 = importlib.import_module("transformers.integrations.finegrained_fp8")

    def quantiser(block: list[int] | None) -> Any:
        return SimpleNamespace(
            quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt="float")
        )

    def theirs_of(stored: Stored, scale: str) -> Weights:
        codec = fp8.Fp8Dequantize(quantiser(None))
        weight = codec._dequantize_one(stored["weight"], stored[scale], torch.bfloat16)
        return Weights(weight, stored["weight"].view(torch.uint8))

    for block, (N, K) in itertools.product(([128, 128], [64, 32], None), BLOCKED):
        codec = fp8.Fp8Quantize(quantiser(block))
        made = codec._quantize_one(f"{NAME}.weight", normal(N, K))
        stored = {name.rpartition(".")[2]: tensor for name, tensor in made.items()}
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
        what = "fp8 tensor" if block is None else f"fp8 block {block[0]}x{block[1]}"
        theirs = theirs_of(stored, "weight_scale_inv")
        yield agree(package, what, "theirs", stored, config, theirs, dtype=torch.bfloat16)
    for name in QUANTIZE_NAMES:
        maker = quantizer(name)
        if maker.config["quant_method"] != "fp8":
            continue
        for N, K in BLOCKED:
            stored = maker.quantize(NAME, normal(N, K))
            scale = next(leaf for leaf in stored if leaf.startswith("weight_scale"))
            theirs = theirs_of(stored, scale)
            yield agree(package, name, "ours", stored, maker.config, theirs, dtype=torch.bfloat16)


def gptqmodel_fp8() -> Iterator[Row]:
    """Its scales divide, under the names of those that multiply."""
    package = f"gptqmodel {version('gptqmodel')}"
    fp8 = importlib.import_module("gptqmodel.nn_modules.qlinear.fp8")
    config_of = importlib.import_module("gptqmodel.quantization.config").FP8Config
    for method, block in (("tensor", None), ("row", None), ("block", [128, 128])):
        config = config_of(
            weight_scale_method=method, weight_block_size=block, offload_to_disk=False
        )
        written = json.loads(json.dumps(config.to_dict(), default=str))  # as in a file
        weight, scale = fp8.quantize_fp8_weight(
            normal(256, 384), weight_scale_method=method, weight_block_size=block
        )
        stored = {"weight": weight, "weight_scale_inv": scale}
        yield refused(package, f"fp8 {method}, scales that divide", stored, written)


# --- all of it ---


def _without_init(*packages: str) -> None:
    """Have modules of a package imported without its `__init__`, which wants much that is not there.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    spec = find_spec(packages[0])
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {packages[0]!r}")
    root = Path(spec.submodule_search_locations[0])
    for name in packages:
        module = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module


SOURCES: dict[str, Callable[[], Iterator[Row]]] = {
    "gptqmodel, GPTQ": gptqmodel_gptq,
    "auto-gptq": autogptq,
    "autoawq": autoawq,
    "gptqmodel, AWQ": gptqmodel_awq,
    "compressed-tensors": compressed_tensors,
    "transformers, FP8": transformers_fp8,
    "gptqmodel, FP8": gptqmodel_fp8,
}


def main() -> int:
    warnings.filterwarnings("ignore")  # of the packages, about each other
    torch.set_grad_enabled(False)
    rows: list[Row] = []
    missing: dict[str, str] = {}
    with redirect_stdout(sys.stderr):  # the packages log
        for source, compare in SOURCES.items():
            try:
                rows += compare()
            except ImportError as exc:
                missing[source] = f"{type(exc).__name__}: {exc}"
    packed = {"theirs": "theirs", "ours": "ours", "theirs refused": "theirs"}
    for row in rows:
        counts = ", ".join(f"{part} {count}" for part, count in row.differing.items())
        shape = f"{row.shape[0]} x {row.shape[1]}" if row.shape[0] else ""
        print(
            f"{row.package:26} {row.what:48} packed by {packed[row.direction]:6} {shape:10} {counts}"
        )
        if row.note:
            print(f"{'':26} {row.note}")
    for source, why in missing.items():
        print(f"{source}: not compared: {why}")
    wrong = [row for row in rows if any(row.differing.values())]
    read_by_us = {row.what for row in rows if row.direction == "ours"}
    unread = [name for name in QUANTIZE_NAMES if name not in read_by_us]
    for name in unread:
        print(f"{name}: not compared: no package that reads it is there")
    print(f"{len(rows)} rows, {len(wrong)} with differences (counts are of weights that differ)")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
