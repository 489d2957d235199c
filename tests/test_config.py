"""``chairlift.toml`` and its objects: what is read, what is refused and how, what wins."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from chairlift import (
    LLM,
    ClassConfig,
    Config,
    ConfigError,
    EngineDeadError,
    JoinConfig,
    KeyConfig,
    MemoryConfig,
    PaceConfig,
    PolicyConfig,
    PriceConfig,
    SamplingParams,
    SheddingConfig,
    TenantConfig,
    _core,
)
from chairlift.cli import main
from chairlift.config import QUEUE_KEYS, TABLES, seconds
from chairlift.config_file import engine_args, load_config, to_toml
from chairlift.engine import _DEFAULT_NUM_KV_BLOCKS
from chairlift.engine_args import (
    DEFAULT_MAX_MODEL_LEN,
    ENGINE_KEYS,
    EngineArgs,
    core_settings,
)
from chairlift.testing import ScriptedExecutor

DOCS = Path(__file__).parent.parent / "docs" / "configuration.md"
EVERYTHING = """
[engine]
max_num_seqs = 64
max_queued_requests = 512
max_queued_tokens = 2_000_000

[queue]
sharing = "fair"
price = { input = 1, cached = 0.25, output = 3 }
charge_predicted_output = true
order = "footprint"
ageing = 0.5
max_level_wait = "1m"
join = { size = 32, delay = "50ms" }
preempt_to_admit = false

[classes.interactive]
level = 1
weight = 2
max_queued_requests = 100
max_queued_tokens = 100_000
max_queue_time = "10s"
on_timeout = "promote"
ttft_target = 2
tpot_target = "80ms"
on_doomed = "relegate"
may_be_shed = true

[classes.batch]

[default_tenant]
best_class = "batch"
default_class = "batch"

[tenants.acme]
weight = 3
default_class = "batch"
best_class = "interactive"
max_running = 8
max_queued = 80
tokens_per_second = 5_000
burst_tokens = 10_000

[tenants."with space"]

[shedding]
above = "30s"
below = "20s"

[memory]
admission = "forecast"
overflow = 0.1
backfill = "off"
backfill_candidates = 4

[pace]
governor = false
iteration_target = "40ms"
min_prefill_tokens = 32

[keys.ops]
hash = "sha256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
tenant = "acme"
default_class = "batch"
best_class = "interactive"
admin = true
"""


@pytest.fixture
def write(tmp_path):
    def go(text, name="chairlift.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return go


# Reading.


def test_every_key_is_read(write):
    config = Config.from_file(write(EVERYTHING))
    assert config == Config(
        engine={"max_num_seqs": 64, "max_queued_requests": 512, "max_queued_tokens": 2_000_000},
        policy=PolicyConfig(
            classes={
                "interactive": ClassConfig(
                    level=1,
                    weight=2,
                    max_queued_requests=100,
                    max_queued_tokens=100_000,
                    max_queue_time=10,
                    on_timeout="promote",
                    ttft_target=2,
                    tpot_target=0.08,
                    on_doomed="relegate",
                    may_be_shed=True,
                ),
                "batch": ClassConfig(),
            },
            tenants={
                "acme": TenantConfig(
                    weight=3,
                    default_class="batch",
                    best_class="interactive",
                    max_running=8,
                    max_queued=80,
                    tokens_per_second=5_000,
                    burst_tokens=10_000,
                ),
                "with space": TenantConfig(),
            },
            default_tenant=TenantConfig(best_class="batch", default_class="batch"),
            shedding=SheddingConfig(above=30, below=20),
            memory=MemoryConfig(
                admission="forecast", overflow=0.1, backfill="off", backfill_candidates=4
            ),
            pace=PaceConfig(governor=False, iteration_target=0.04, min_prefill_tokens=32),
            sharing="fair",
            price=PriceConfig(cached=0.25, output=3),
            charge_predicted_output=True,
            order="footprint",
            ageing=0.5,
            max_level_wait=60,
            join=JoinConfig(size=32, delay=0.05),
            preempt_to_admit=False,
        ),
        keys={
            "ops": KeyConfig(
                hash=f"sha256:{'a' * 32}{'b' * 32}",
                tenant="acme",
                default_class="batch",
                best_class="interactive",
                admin=True,
            )
        },
    )
    assert list(config.policy.classes) == ["interactive", "batch"], "the first is the default"
    written = tomllib.loads(EVERYTHING)
    assert written["queue"].keys() == set(QUEUE_KEYS), "the test leaves a key out"
    assert written["classes"]["interactive"].keys() == names(ClassConfig)
    assert written["tenants"]["acme"].keys() == names(TenantConfig)
    assert written["shedding"].keys() == names(SheddingConfig)
    assert written["memory"].keys() == names(MemoryConfig)
    assert written["pace"].keys() == names(PaceConfig)
    assert written["keys"]["ops"].keys() == names(KeyConfig)


def names(cls):
    return {item.name for item in fields(cls)}


def test_an_empty_file_is_no_file(write):
    assert Config.from_file(write("")) == load_config(None) == Config()
    assert engine_args(None, {}) == EngineArgs()


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ("250ms", 0.25),
        ("2s", 2),
        ("1.5 s", 1.5),
        ("5m", 300),
        ("1h", 3_600),
        ("15us", 15e-6),
        (0.5, 0.5),
        (3, 3),
        (0, 0),
    ],
)
def test_durations(given, length):
    assert seconds(given) == pytest.approx(length, rel=1e-12)
    assert ClassConfig(ttft_target=given).ttft_target == seconds(given)


@pytest.mark.parametrize(
    "given", ["", "5", "ms", "-1s", "5 parsecs", "1e3s", "٣s", True, [], -1, float("nan"), 1e18]
)
def test_what_is_no_duration(given):
    with pytest.raises(ConfigError, match=r"^ttft_target is .*; it must be a duration .*250ms"):
        ClassConfig(ttft_target=given)


def test_tables_may_stand_for_objects():
    policy = PolicyConfig(
        classes={"a": {"level": 1}}, tenants={"b": {"weight": 2}}, shedding={"above": 2, "below": 1}
    )
    assert policy.classes["a"] == ClassConfig(level=1)
    assert policy.tenants["b"] == TenantConfig(weight=2)
    assert policy.shedding == SheddingConfig(above=2, below=1)


def test_mappings_are_copied():
    classes = {"a": ClassConfig()}
    policy = PolicyConfig(classes=classes)
    classes["b"] = ClassConfig()
    assert list(policy.classes) == ["a"]


# Writing.


@pytest.mark.parametrize(
    "text",
    [
        "",
        EVERYTHING,
        '[queue]\nprice = "device_time"\njoin = "static"\nmax_level_wait = 0.000123\n',
        '[classes."a \\"quoted\\" näme"]\n[engine]\nmodel = "dir\\\\\\n\\u007f\\u0001"\n',
    ],
)
def test_what_is_printed_reads_back_as_the_same(write, text, capsys):
    path = write(text)
    config = Config.from_file(path)
    assert main(["config", "check", str(path)]) == 0
    printed = capsys.readouterr().out
    again = Config.from_file(write(printed, "again.toml"))
    assert again.policy == config.policy
    # Defaults are written out, so the engine's table has more in it, and means the same.
    assert engine_args(None, {"config": again}) == EngineArgs(**{**config.engine, "config": again})
    assert to_toml(again) == printed
    assert again.engine["max_queued_requests"] == (512 if text == EVERYTHING else 4_096)


def test_an_object_that_no_file_can_hold():
    with pytest.raises(ConfigError, match=r"engine\.executor is .*; it must be text to be written"):
        to_toml(Config(engine={"executor": ScriptedExecutor()}))


# Refusals: the file, the dotted path, the value, what is allowed.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[queue\n", r"it is no TOML: .* \(at line 1, column 7\)"),
        ("a = " + "[" * 5_000, "it is no TOML: "),
        ("a = " + "1" * 5_000, "it is no TOML: "),
        ("[engine]\nseed = 0x1" + "0" * 5_000, r"engine\.seed is a huge number; it must be an int"),
        ("[classes.a]\nlevel = 0x1" + "0" * 5_000, r"classes\.a\.level is a huge number; it must"),
        ("[classes.a]\nweight = 0x1" + "0" * 5_000, r"classes\.a\.weight is a huge number; it mus"),
        ("[engine]\ntokenizer = 3", r"engine\.tokenizer is 3; it must be a string or have token_t"),
        (
            "[engine]\nexecutor = 3",
            r"engine\.executor is 3; it must be a string or have launch\(\)",
        ),
        (b"\xff", "it is no UTF-8 text: invalid start byte at 0"),
        ("queu.a = 3", r"queu is no setting; did you mean queue\? known are classes, "),
        ("queue = 3", "queue is 3; it must be a table"),
        ('[queue]\nsharin = "fair"', r"queue\.sharin is no setting; did you mean sharing\? known"),
        ('[queue]\nsharing = "fare"', r'queue\.sharing is "fare"; it must be "fcfs" or "fair"'),
        ("[queue]\nsharing = 1", r"queue\.sharing is 1; it must be a string"),
        ('[queue]\norder = ""', r'queue\.order is ""; it must be "arrival" or "shortest" or'),
        ('[queue]\nprice = "time"', r'queue\.price is "time"; it must be "device_time" or a table'),
        ("[queue]\nprice = 3", r"queue\.price is 3; it must be a table"),
        ("[queue]\nprice = {inpt = 1}", r"queue\.price\.inpt is no setting; did you mean input\?"),
        ("[queue]\nprice = {input = ''}", r"queue\.price\.input is ''; it must be a number"),
        ("[queue]\nprice = {input = -1}", r"queue\.price\.input is -1; it must be from 0 to 1000"),
        ("[queue]\njoin = {size = 3}", r"queue\.join is .* a table of size and delay; delay is mi"),
        ("[queue]\njoin = {size=0, delay=1}", r"queue\.join\.size is 0; it must be at least 1"),
        ("[queue]\nageing = nan", r"queue\.ageing is nan; it must be a finite number"),
        ("[queue]\nageing = -1", r"queue\.ageing is -1; it must be a number of at least 0"),
        ("[queue]\nmax_level_wait = 0", r"queue\.max_level_wait is 0; it must be more than 0"),
        ("[queue]\nmax_level_wait = '1x'", r"queue\.max_level_wait is '1x'; it must be a duration"),
        ("[queue]\npreempt_to_admit = 1", r"queue\.preempt_to_admit is 1; it must be true or fal"),
        ("[classes]", "classes is empty; it must be at least one class"),
        ("[classes]\na = 3", r"classes\.a is 3; it must be a table"),
        ("[classes.a]\nlevle = 3", r"classes\.a\.levle is no setting; did you mean level\? known"),
        (
            "[classes.a]\nlevel = 3_000_000_000",
            r"classes\.a\.level is 3000000000; it must be an in",
        ),
        ("[classes.a]\nlevel = true", r"classes\.a\.level is True; it must be an integer"),
        ("[classes.a]\nweight = 0", r"classes\.a\.weight is 0; it must be from 0\.001 to 1000"),
        ("[classes.a]\nweight = 1979-05-27", r"classes\.a\.weight is .*; it must be a number"),
        ("[classes.a]\nmax_queued_requests = 0", r"classes\.a\.max_queued_requests is 0; it must"),
        ("[classes.a]\nmax_queued_tokens = -1", r"classes\.a\.max_queued_tokens is -1; it must be"),
        ("[classes.a]\non_timeout = 'no'", r'classes\.a\.on_timeout is "no"; it must be "expire" '),
        ("[classes.a]\non_doomed = 'no'", r'classes\.a\.on_doomed is "no"; it must be "keep" or'),
        ("[classes.'']", 'classes is ""; it must be a name of 1 to 128 bytes'),
        ("tenants = []", "tenants is []; it must be a table of tables".replace("[]", r"\[\]")),
        ("[tenants.x]\ndefault_class = 'b'", r"tenants\.x\.default_class is b; it must be one of"),
        ("[tenants.x]\nburst_tokens = 1", r"tenants\.x\.burst_tokens is 1; it must be left out"),
        ("[tenants.x]\ntokens_per_second = 1.5", r"tenants\.x\.tokens_per_second is 1\.5; it must"),
        ("[default_tenant]\nmax_running = 0", r"default_tenant\.max_running is 0; it must be more"),
        ("[shedding]\nabove = 1\nbelow = 2", r"shedding\.below is 2000000 us; it must be less "),
        ("[shedding]\nabove = 1", r"shedding is .*; it must be a table .*; below is missing"),
        ("[memory]\nadmission = 'no'", r'memory\.admission is "no"; it must be "optimistic" or "r'),
        ("[memory]\noverflow = 0", r"memory\.overflow is 0; it must be more than 0 and at most 0"),
        ("[memory]\noverflow = 0.6", r"memory\.overflow is 0\.6; it must be more than 0 and at"),
        ("[memory]\nbackfill = 'all'", r'memory\.backfill is "all"; it must be "easy" or "off" or'),
        (
            "[memory]\nbackfill_candidates = 0",
            r"memory\.backfill_candidates is 0; it must be from 1",
        ),
        ("[memory]\nbackfil = 1", r"memory\.backfil is no setting; did you mean backfill\? known"),
        ("[engine]\nmax_num_seqs = 0", r"engine\.max_num_seqs is 0; it must be at least 1"),
        ("[engine]\nmax_num_seqs = '0'", r"engine\.max_num_seqs is '0'; it must be an integer"),
        ("[engine]\nmax_num_seqs = 5000", r"engine\.max_num_seqs \(5000\) is above max_num_batch"),
        ("[engine]\nmax_queued_tokens = 0", r"engine\.max_queued_tokens is 0; it must be at lea"),
        ("[engine]\nmodel = 3", r"engine\.model is 3; it must be a string"),
        ("[engine]\nmax_nm_seqs = 3", r"engine\.max_nm_seqs is no setting; did you mean max_num_s"),
        ("[engine]\nconfig = ''", r"engine\.config is no setting"),
    ],
)
def test_an_error_says_where_what_and_what_is_allowed(write, text, message, capsys):
    path = write(text)
    assert main(["config", "check", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(rf"chairlift: {re.escape(str(path))}: {message}.*\n", captured.err)
    with pytest.raises(ConfigError) as caught:
        LLM("/no/such/model", config=path)
    assert captured.err == f"chairlift: {caught.value}\n"
    assert main(["generate", "x", "--config", str(path)]) == 1
    assert capsys.readouterr().err == captured.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[keys.a]\nhash = "s3cret"', r'keys\.a\.hash must be "sha256:" and 64 hexadecimal'),
        ("[keys.a]\nhash = 5", r"keys\.a\.hash must be"),
        ('[keys.a]\nkey = "s3cret"', r"keys\.a\.key is no setting"),
        ('[keys.a]\ntenant = "s3cret"', r"keys\.a must be a table of hash; hash is missing"),
        ('[keys]\na = "s3cret"', r"keys\.a must be a table"),
        ('keys = "s3cret"', r"keys must be a table of tables"),
        (
            f'[keys.a]\nhash = "sha256:{"0" * 64}"\nbest_class = "none"',
            r"keys\.a\.best_class is 'none'; it must be one of the classes, default",
        ),
    ],
)
def test_a_key_that_cannot_be_is_not_shown(write, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Config.from_file(write(text))
    assert "s3cret" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path, capsys):
    for path, why in ((tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")):
        assert main(["config", "check", str(path)]) == 2
        assert re.fullmatch(
            rf"chairlift: {path}: it cannot be read: {why}.*\n", capsys.readouterr().err
        )


def test_objects_are_checked_like_files():
    with pytest.raises(ConfigError, match=r"^weight is 'x'; it must be a number"):
        ClassConfig(weight="x")
    with pytest.raises(ConfigError, match=r"^classes\.a\.weight is 0; it must be from"):
        LLM("/no/such/model", config=Config(policy=PolicyConfig(classes={"a": {"weight": 0}})))
    with pytest.raises(ConfigError, match=r"^engine\.colour is no setting"):
        LLM("/no/such/model", config=Config(engine={"colour": 1}))
    with pytest.raises(
        ConfigError, match="config is of type dict; it must be a Config or the path"
    ):
        LLM("/no/such/model", config={})
    with pytest.raises(ConfigError, match="text without lone surrogates"):
        TenantConfig(best_class="\ud800")


# What wins, and what reaches the core.


def test_arguments_win_over_the_file_and_the_file_over_defaults(write):
    path = write(
        '[engine]\nmodel = "dir"\nmax_num_seqs = 7\nblock_size = 32\n[queue]\norder="prefix"'
    )
    args = engine_args(None, {"config": path, "max_num_seqs": 9})
    assert (args.model, args.max_num_seqs, args.block_size, args.seed) == ("dir", 9, 32, 0)
    assert args.config.policy.order == "prefix"
    assert engine_args("other", {"config": path}).model == "other"


def test_flags_win_over_the_file(write, capsys):
    path = write(
        '[engine]\nexecutor = "chairlift.testing:ScriptedExecutor"\nmax_model_len = 40\n'
        "max_num_seqs = 5000\nmax_num_batched_tokens = 8192\n"
    )
    flags = ["generate", "--raw", "x" * 60, "--max-tokens", "2", "--config", str(path)]
    assert main(flags) == 1
    assert "context length is 40 tokens" in capsys.readouterr().out
    assert main([*flags, "--max-model-len", "64"]) == 0


def test_defaults_are_the_cores_own():
    own = json.loads(_core.settings_json())
    assert own["max_model_len"] == DEFAULT_MAX_MODEL_LEN
    assert own["num_kv_blocks"] == _DEFAULT_NUM_KV_BLOCKS
    of_the_model = {key: own[key] for key in ("max_model_len", "num_kv_blocks", "vocab_size")}
    ours = json.loads(_core.settings_json(core_settings(EngineArgs(), **of_the_model)))
    assert ours == own
    assert own["policy"]["classes"][0]["name"] == "default"


def test_the_core_knows_every_choice():
    for key, choices in {
        "sharing": ["fcfs", "fair"],
        "order": ["arrival", "shortest", "footprint", "deadline", "prefix"],
        "join": ["continuous", "static", JoinConfig(size=2, delay=1)],
        "price": ["device_time", PriceConfig()],
    }.items():
        for choice in choices:
            _core.check_policy(PolicyConfig(**{key: choice}))
    for admission in ("optimistic", "reserve", "forecast"):
        _core.check_policy(PolicyConfig(memory={"admission": admission}))
    for settings in ({"on_timeout": "promote"}, {"on_doomed": "drop"}):
        _core.check_policy(PolicyConfig(classes={"a": settings}))


# Reload.


@pytest.fixture
def policy_file(write):
    def go(text, name="chairlift.toml"):
        return write(
            f'[queue]\nsharing = "fair"\n[classes.a]\nlevel = 1\n[classes.b]\n{text}', name
        )

    return go


def test_reload_applies_to_a_running_engine_and_loses_nothing(policy_file):
    executor = ScriptedExecutor(step_time=0.002)
    with LLM(executor=executor, config=policy_file("weight = 2")) as llm:
        changed = Config.from_file(policy_file("weight = 5\n[tenants.acme]\nweight = 3"))
        sources = [policy_file("[tenants.x]", "x.toml"), changed]
        params = SamplingParams(max_tokens=20)
        with pytest.MonkeyPatch.context() as patch:
            execute = executor.execute

            def reloading(plan):
                llm.reload(sources[plan.step % 2])  # in the middle of a step
                return execute(plan)

            patch.setattr(executor, "execute", reloading)
            results = llm.generate(["p", "q", "r"], params, use_tqdm=False)
        for prompt, result in zip("pqr", results, strict=True):
            assert result.outputs[0].token_ids == executor.expected(prompt, 20)
        llm.reload(changed)
        assert llm._engine.config is changed
        metrics = llm.metrics()
        assert metrics["submitted"] == metrics["finished"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[classes.c]", "classes is a, b, c; it must be the same classes with the same levels"),
        ("level = 3", "classes is a, b; it must be the same classes with the same levels"),
        ("weight = 0", r"classes\.b\.weight is 0; it must be from"),
        ("[engine]\nblock_size = 8", r"engine\.block_size is 8; it must be left out, as when the"),
    ],
)
def test_a_reload_that_cannot_be_changes_nothing(policy_file, text, message):
    with LLM(executor=ScriptedExecutor(), config=policy_file("")) as llm:
        before = llm._engine.config
        path = policy_file(text, "new.toml")
        with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: {message}"):
            llm.reload(path)
        assert llm._engine.config is before
        (result,) = llm.generate("x", SamplingParams(max_tokens=3), use_tqdm=False)
        assert result.error is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("sharing", "fcfs"), ("price", "device_time"), ("order", "prefix"), ("join", "static")],
)
def test_how_a_queue_works_is_fixed_while_it_runs(policy_file, key, value):
    with LLM(executor=ScriptedExecutor(), config=policy_file("")) as llm:
        old = llm._engine.config.policy
        queue = {"sharing": "fair"} | {key: value}
        changed = Config(policy=PolicyConfig(classes=old.classes, **queue))
        with pytest.raises(ConfigError, match=rf"^queue\.{key} is changed; it must be the same"):
            llm.reload(changed)


def test_the_engine_table_of_the_start_is_no_change_though_arguments_won(policy_file):
    path = policy_file("[engine]\nmax_num_seqs = 8")
    with LLM(executor=ScriptedExecutor(), config=path, max_num_seqs=4) as llm:
        assert llm.limits["max_num_seqs"] == 4
        llm.reload(path)


def test_the_memory_of_newcomers_is_reckoned_with_otherwise_from_a_reload_on(policy_file):
    with LLM(executor=ScriptedExecutor(), config=policy_file("")) as llm:
        assert llm.metrics()["memory_overflow_target"] == 0
        policy = llm._engine.config.policy
        memory = MemoryConfig(admission="forecast", overflow=0.2)
        llm.reload(Config(policy=replace(policy, memory=memory)))
        llm.generate("x", SamplingParams(max_tokens=3), use_tqdm=False)
        metrics = llm.metrics()
        assert metrics["memory_overflow_target"] == 0.2
        assert (metrics["memory_lives"], metrics["memory_overflows"]) == (1, 0)
        assert 0 <= metrics["memory_quantile"] <= 1


def test_reloading_an_ended_engine():
    llm = LLM(executor=ScriptedExecutor())
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        llm.reload(Config())


# The document.


def test_the_document_lists_every_key_with_its_default():
    """A row begins with the key in code; its default is what the printed settings say."""
    sections = re.split(r"^## ", DOCS.read_text(), flags=re.MULTILINE)
    tables = {section.split("\n", 1)[0].strip(): section for section in sections}
    told = {
        title: dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) \|", section, re.MULTILINE))
        for title, section in tables.items()
    }
    expected = {
        "`[engine]`": set(ENGINE_KEYS),
        "`[queue]`": set(QUEUE_KEYS),
        "`[classes.NAME]`": names(ClassConfig),
        "`[tenants.NAME]` and `[default_tenant]`": names(TenantConfig),
        "`[shedding]`": names(SheddingConfig),
        "`[memory]`": names(MemoryConfig),
        "`[pace]`": names(PaceConfig),
        "`[keys.NAME]`": names(KeyConfig),
    }
    assert {title: set(told[title]) for title in expected} == expected
    assert {title.split("]")[0].strip("`[").split(".")[0] for title in expected} | {
        "default_tenant"
    } == {"engine", "queue", "keys", *TABLES}
    printed = to_toml(Config(policy=PolicyConfig(classes={"NAME": {}}, tenants={"NAME": {}})))
    for title in [*list(expected)[:4], "`[memory]`", "`[pace]`"]:
        table = title.split("`")[1]
        (section,) = re.findall(rf"^{re.escape(table)}\n((?:[^\n]+\n)+)", printed, re.MULTILINE)
        values = dict(re.findall(r"^(\w+) = (.*)$", section, re.MULTILINE))
        for key, default in told[title].items():
            shown = default.strip("`").replace("_", "") if default[1:2].isdigit() else default
            assert shown.strip("`") == values.get(key, "not set"), (title, key)


def test_the_documents_example_works(write):
    for document in (DOCS, DOCS.parent.parent / "README.md"):
        examples = re.findall(r"```toml\n(.*?)```", document.read_text(), re.DOTALL)
        assert examples
        for example in examples:
            Config.from_file(write(example))
