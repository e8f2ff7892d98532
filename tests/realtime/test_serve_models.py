"""Whatever `--model` and `--format` name is served, or refused in one sentence."""

from pathlib import Path

import pytest

from model.quantize_checkpoint import plan_quantization, write_quantized
from model.random_checkpoint import write_checkpoint
from model.random_model import RandomModel
from ops.fp8_rows import Fp8Rows
from realtime.cli import placement
from realtime.cli.placement import place
from realtime.cli.serve import load_engine
from realtime.config import ServerConfig
from realtime.errors import PlosiveError
from realtime.pingpong.engine import PingPongEngine
from realtime.pingpong.messages import OpenSlot, SlotReady
from realtime.pingpong.slots import Slots
from realtime.voices import VoiceStore
from tests.support.engine import Recorder, sampling, speak


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    files = folder / "files"
    files.mkdir()
    write_checkpoint(RandomModel("tiny", frames=3, reference_s=2), files)
    for format in ("bsgemm", "mxfp8"):
        (folder / format).mkdir()
        write_quantized(plan_quantization(files, format), folder / format)  # type: ignore[arg-type]
    names = {name: str(folder / name) for name in ("files", "bsgemm", "mxfp8")}
    return names | {"random": "random:tiny?frames=3&reference_s=2"}


def config(model: str, **options: object) -> ServerConfig:
    return ServerConfig(model=model, device="cpu", max_slots=1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["files", "bsgemm", "mxfp8", "random"])
def test_a_turn_of_every_kind_of_model(
    models: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = load_engine(config(models[name], max_context=512))
    assert isinstance(engine, PingPongEngine)
    info, recorder = engine.info, Recorder()
    assert info.model_name == Path(models[name]).name
    store = VoiceStore(info.builtin_voices_path, tmp_path / "none", codec_id="", num_codebooks=4)
    voice = store.get(info.default_voice)
    assert voice.codes.shape == (4, 43)
    engine.start(recorder)
    try:
        engine.warm_up((voice,))
        slot = engine.slots.acquire()
        assert slot is not None
        engine.submit(OpenSlot(slot, (voice,), "", sampling(), 60_000))
        assert recorder.wait(SlotReady).cached
        assert len(speak(engine, recorder, slot, 1, "A test.")) == 3 * info.frame_samples
    finally:
        engine.stop()


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_keys_and_values_are_kept_as_asked(kv_format: str) -> None:
    options = {"max_context": 512, "kv_format": kv_format}
    engine = load_engine(config("random:tiny?frames=3&reference_s=2", **options))
    assert isinstance(engine, PingPongEngine)
    assert isinstance(engine._cache.kv, Fp8Rows) == (kv_format == "fp8")


def test_what_loading_took_is_said_of_large_models(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_engine(config(models["files"], max_context=512)).stop()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("realtime.cli.serve._WORTH_A_LINE_BYTES", 0)
    load_engine(config(models["files"], max_context=512)).stop()
    line = capsys.readouterr().out
    assert line.startswith("Loaded files on cpu: 0.01 GB in ") and line.endswith(" GB/s)\n")


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("files", "bf16", "format: got 'bf16' on a CPU, expected auto"),
        ("bsgemm", "eager", "got 'eager' for a checkpoint quantised as bsgemm, expected 'bsfp8'"),
    ],
)
def test_a_format_that_cannot_be(
    models: dict[str, str], name: str, format: str, message: str
) -> None:
    with pytest.raises(PlosiveError, match=message) as refused:
        load_engine(config(models[name], format=format))
    assert refused.value.code == "model_unusable"


@pytest.mark.parametrize(("name", "format"), [("files", "bsfp8"), ("bsgemm", "auto")])
def test_eight_bits_on_a_cpu_are_said_to_be_slow(
    models: dict[str, str], name: str, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    load_engine(config(models[name], format=format)).stop()
    assert "8-bit weights on a CPU" in caplog.text


@pytest.mark.parametrize("model", ["random:s3", "random:tiny?frames=0"])
def test_a_random_model_that_there_is_not(model: str) -> None:
    with pytest.raises(PlosiveError, match="cannot load the model: random:"):
        load_engine(config(model))


@pytest.mark.parametrize(
    ("device", "has_gpu", "max_slots", "expected"),
    [
        ("cpu", True, None, 4),
        ("auto", False, None, 4),
        ("cpu", False, 7, 7),
    ],
)
def test_slots_where_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    has_gpu: bool,
    max_slots: int | None,
    expected: int,
) -> None:
    monkeypatch.setattr(placement, "_has_gpu", lambda: has_gpu)
    given: list[int] = []

    def load(_: ServerConfig, __: str, slots: Slots) -> None:
        given.append(slots.num_slots)

    place(ServerConfig(device=device, max_slots=max_slots), load)  # type: ignore[arg-type]
    assert given == [expected]


def test_slots_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_has_gpu", lambda: True)
    assert placement._default_slots(("auto",)) == 64
    assert placement._default_slots(("cuda:0", "cuda:1")) == 128
