"""A Llama-architecture GGUF with a byte-level BPE, written as a Hugging Face directory.

Made for the default model, and no more general than that. Tensors are dequantised to fp32, which
holds the published values exactly; llama.cpp stores the rows of Q and K in another order (pairs
interleaved), which is undone. Tokenizer and chat template come from the file's metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from chairlift.errors import ModelFileError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL = 3  # token type "control" of GGUF


def convert_gguf(source: Path, directory: Path) -> None:
    """Write ``source`` into ``directory`` as safetensors, configuration and tokenizer.

    Raises:
        ModelFileError: the file is not a Llama GGUF with a byte-level BPE of the kind ``smollm``.
    """
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelFileError(f"{source} is not a GGUF file ({error}); fetch it again") from error
    kind = [_field(reader, key) for key in ("general.architecture", "tokenizer.ggml.pre")]
    if kind != ["llama", "smollm"]:
        raise ModelFileError(
            f"{source} is a GGUF of the kind {kind}; only llama with smollm is converted"
        )

    config = _config(reader)
    _write_json(directory / "config.json", config)
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", token_ids)
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    special = [
        token
        for token, kind in zip(tokens, _field(reader, "tokenizer.ggml.token_type"), strict=True)
        if kind == _SPECIAL
    ]
    _tokenizer(tokens, _field(reader, "tokenizer.ggml.merges"), special).save(
        str(directory / "tokenizer.json")
    )
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(reader, tokens, config))
    _write_tensors(reader, config, directory / "model.safetensors")


def _field(reader: GGUFReader, key: str) -> Any:  # noqa: ANN401 - the file says what it is
    field = reader.get_field(key)
    if field is None:
        raise ModelFileError(f"the GGUF file has no field {key}; fetch it again")
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": _field(reader, "llama.context_length"),
        # an fp32 in the file: 1e-5 reads as 9.999999747378752e-06
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in reader.tensors),
        "torch_dtype": "float32",
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _tokenizer(tokens: list[str], merges: list[str], special: list[str]) -> Tokenizer:
    """Build the byte-level BPE of kind ``smollm``: digits are split off one by one beforehand.

    That is the published tokenizer, and llama.cpp's reading of the file. transformers' reading of
    it leaves the splitting out, which differs where two or more blanks precede a digit.
    """
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def _tokenizer_config(
    reader: GGUFReader, tokens: list[str], config: dict[str, Any]
) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }


def _write_tensors(reader: GGUFReader, config: dict[str, Any], path: Path) -> None:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, NDArray[np.float32]] = {}
    for tensor in tqdm(reader.tensors, desc="converting it", unit="tensor"):
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        *block, part, kind = tensor.name.split(".")  # "blk.0.attn_q.weight"
        if part in heads:
            values = _unpermute(values, heads[part])
        prefix = f"model.layers.{block[1]}." if block else ""
        tensors[f"{prefix}{_TENSORS[part]}.{kind}"] = np.ascontiguousarray(values)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod((path.parent / "config.json").stat().st_mode)  # it comes readable by its owner only


def _unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of the rows of Q and K: halves instead of interleaved pairs."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
