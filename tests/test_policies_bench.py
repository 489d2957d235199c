"""The policy experiments run on workloads made here, each once and tiny: what nobody runs rots."""

from __future__ import annotations

import gzip
import json
import math
import re
import sys

import numpy as np
import pytest

import policies
from chairlift.config import PolicyConfig
from chairlift.simulation import GPU_8B, Options, Workload, simulate
from simulation import measures, report, traces
from simulation.bench import Bench, Run, read_profile
from simulation.experiments import EXPERIMENTS
from simulations import EXACT, settings

CHECKS = {
    "head-of-line": 2,
    "fairness": 6,
    "flood": 2,
    "priority": 7,
    "overload": 3,
    "queue-time": 4,
    "order": 0,
    "memory": 8,
    "governor": 2,
    "backfill": 4,
}


def write(path, lines):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A trace of clients, one of whom sends most, and a file of lengths."""
    random = np.random.default_rng(1)
    folder = tmp_path_factory.mktemp("traces")
    arrivals = np.cumsum(random.exponential(0.1, 120))
    clients = random.choice(["flooder", "one", "two"], 120, p=[0.7, 0.2, 0.1])
    lines = ["arrival_s,input_tokens,output_tokens,class"]
    lines += [
        f"{arrival:.3f},{random.integers(50, 400)},{random.integers(2, 60)},{client}"
        for arrival, client in zip(arrivals, clients, strict=True)
    ]
    lengths = ["input_tokens,output_tokens"]
    lengths += [f"{random.integers(100, 900)},{random.integers(20, 80)}" for _ in range(120)]
    trace = write(folder / "clients.csv.gz", lines)
    return trace, write(folder / "lengths.csv.gz", lengths)


def arguments(experiment, files, *more):
    trace, batch = files
    return [
        *("--experiment", experiment, "--trace", str(trace), "--batch", str(batch)),
        *("--load", "1.2", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"),
        *("--iterations", "200", "--max-tokens", "100", "--quiet", *more),
    ]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_runs(experiment, files, capsys):
    status = policies.main(arguments(experiment, files, "--json", "--seed", "7"))
    content = json.loads(capsys.readouterr().out)
    assert content["experiment"] == experiment
    assert len(content["checks"]) == CHECKS[experiment]
    assert status == (0 if all(check["holds"] for check in content["checks"]) else 1)
    state = content["state"]
    for key in ("profile", "pool", "trace", "load", "seed", "limits"):
        assert state[key]
    assert state["seed"] == "7"
    tables = {table["title"]: table["rows"] for table in content["tables"]}
    assert all(row["by"] for row in tables["What bound"])
    rows = [row for table in tables.values() for row in table]
    assert any(isinstance(value, float) and value > 0 for row in rows for value in row.values())


def test_memory_compares_the_modes_on_every_trace_in_a_pool_that_is_too_small(
    files, tmp_path, capsys
):
    costs = {name: getattr(GPU_8B, name) for name in GPU_8B.__dataclass_fields__}
    profile = tmp_path / "tiny.json"
    profile.write_text(json.dumps({**costs, "num_kv_blocks": 70}), encoding="utf-8")
    more = ("--also", str(files[1]), "--profile", str(profile), "--json")
    policies.main(arguments("memory", files, *more))
    content = json.loads(capsys.readouterr().out)
    tables = {table["title"]: table["rows"] for table in content["tables"]}
    modes = ["reserve", "optimistic", "forecast 5%", "forecast 10%"]
    for trace in ("clients", "lengths", "clients, changing"):
        rows = {row["run"]: row for row in tables[trace]}
        assert list(rows) == modes
        assert rows["reserve"]["preemptions"] == 0
        assert rows["reserve"]["mean running"] < rows["optimistic"]["mean running"]
        assert rows["forecast 5%"]["overflow target"] == "5%"
    assert any(rows["preemptions"] for rows in tables["clients"])
    checks = {check["claim"]: check["holds"] for check in content["checks"]}
    assert checks["reserve: nobody is preempted"]


def test_the_same_seed_gives_the_same_report(files, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        policies.main(arguments("order", files, "--json", "--seed", seed))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_pictures_and_section_are_written(files, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for _ in range(2):
        policies.main(arguments("head-of-line", files, "--out", str(tmp_path)))
    policies.main(arguments("order", files, "--out", str(tmp_path)))
    table = capsys.readouterr().out
    assert "profile: gpu-8b" in table
    assert "Engine" in table
    for name in ("head-of-line", "order"):
        png = (tmp_path / "pictures" / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    page = (tmp_path / "policies.md").read_text(encoding="utf-8")
    assert re.findall("^## (.*)", page, re.MULTILINE) == [
        "Head-of-line blocking",
        "Order within a flow",
    ]
    assert "](pictures/head-of-line.svg)" in page
    assert "| claim | measured | holds |" in page


def test_a_section_is_replaced_in_its_place(tmp_path):
    page = tmp_path / "policies.md"
    for name, title in (("a", "Old"), ("b", "Second"), ("a", "New")):
        report.write_section(page, report.Report(name, title), "pictures")
    titles = re.findall("^## (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert titles == ["New", "Second"]


def test_no_matplotlib_is_said_plainly(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert policies.main(arguments("order", files, "--out", str(tmp_path))) == 2
    assert "install chairlift[bench]" in capsys.readouterr().err


def test_a_trace_is_read_as_it_is_written(tmp_path):
    lines = [
        "arrival_s,input_tokens,output_tokens,prefix_hashes,class",
        "0.5,700,3,10 11,a",
        "1.5,100,4,,b",
        "2.5,600,5,10 12,a",
    ]
    trace = traces.read_trace(write(tmp_path / "small.csv.gz", lines))
    assert trace.name == "small"
    assert trace.tenants == ("a", "b")
    assert trace.tenant.tolist() == [0, 1, 0]
    assert trace.prefix_offsets.tolist() == [0, 2, 2, 4]
    assert trace.prefix_hashes.tolist() == [0, 1, 0, 2]
    workload = trace.at_rate(4, seed=0)
    assert workload.arrival_s.tolist() == [0, 0.25, 0.5]
    assert workload.output_tokens.tolist() == [3, 4, 5]
    some = trace.where(np.array([False, True, True]))
    assert some.prefix_offsets.tolist() == [0, 0, 2]
    assert some.prefix_hashes.tolist() == [0, 2]
    assert some.tenant.tolist() == [1, 0]


def test_lengths_are_divided_and_prefixes_stay_shared(tmp_path):
    lines = ["input_tokens,output_tokens,prefix_hashes", "1000,9,1 2", "513,1,1 3"]
    trace = traces.read_trace(write(tmp_path / "small.csv.gz", lines)).divided(8)
    workload = trace.at_once()
    assert workload.input_tokens.tolist() == [125, 65]
    assert workload.output_tokens.tolist() == [2, 1]
    assert workload.prefix_block_tokens == 64
    assert workload.prefix_hashes.tolist() == [0, 1, 0, 2]
    with pytest.raises(ValueError, match="512 must be a multiple"):
        traces.read_trace(tmp_path / "small.csv.gz").divided(5)


def test_lengths_get_poisson_arrivals_at_the_rate(tmp_path):
    lines = ["input_tokens,output_tokens", *["10,5"] * 1_001]
    trace = traces.read_trace(write(tmp_path / "lengths.csv.gz", lines))
    arrivals = trace.at_rate(50, seed=1).arrival_s
    assert arrivals[0] == 0
    assert arrivals[-1] == pytest.approx(20)
    gaps = np.diff(arrivals)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    assert (arrivals != trace.at_rate(50, seed=2).arrival_s).any()


def test_arrivals_that_were_logged_in_batches_are_spread():
    batches = np.array([0.0, 0, 0, 3, 3, 3, 6, 6])
    assert traces.spread(batches).tolist() == [0, 1, 2, 3, 4, 5, 6, 7.5]
    single = np.array([0.0, 1, 1, 2])
    assert traces.spread(single).tolist() == single.tolist()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["input_tokens,output_tokens", "5,x"],
            "line 2, column output_tokens: 'x' is not a number",
        ),
        (["input_tokens,output_tokens", "0,1"], "line 2, column input_tokens: '0' is not a number"),
        (
            ["input_tokens,output_tokens", "5"],
            "line 2, column output_tokens: the line has 1 values",
        ),
        (["input_tokens"], "line 1, column output_tokens: there is no such column"),
        (["input_tokens,output_tokens,when"], "line 1, column when: columns are arrival_s"),
        (["input_tokens,output_tokens"], "there are no requests"),
        (
            ["arrival_s,input_tokens,output_tokens", "2,1,1", "1,1,1"],
            "line 3, column arrival_s: 1.0 is before 2.0",
        ),
        (["arrival_s,input_tokens,output_tokens", "nan,1,1"], "'nan' is not a number of seconds"),
        (
            ["input_tokens,output_tokens,prefix_hashes", "1,1,1 b"],
            "line 2, column prefix_hashes: '1 b' is not a list of integers",
        ),
    ],
)
def test_a_wrong_trace_is_told_by_line_and_column(tmp_path, lines, message, capsys):
    path = write(tmp_path / "wrong.csv.gz", lines)
    assert policies.main(["--experiment", "order", "--trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(path) in error


def test_a_flood_needs_clients(files, capsys):
    assert policies.main(arguments("flood", (files[1], files[1]))) == 2
    assert "lengths has no clients (column class)" in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_refused(tmp_path, capsys):
    path = tmp_path / "broken.csv.gz"
    path.write_bytes(b"not gzip")
    for wrong in (path, tmp_path / "missing.csv.gz"):
        assert policies.main(["--experiment", "order", "--trace", str(wrong)]) == 2
        assert f"{wrong}: cannot be read" in capsys.readouterr().err


def test_a_profile_is_a_name_or_a_file(tmp_path):
    assert read_profile("gpu-8b-small").num_kv_blocks == 4_000
    with pytest.raises(ValueError, match="the profiles are gpu-8b, gpu-8b-small"):
        read_profile("gpu-9b")
    path = tmp_path / "mine.json"
    values = dict.fromkeys(("t0_s", "t_seq_s", "t_w_s", "t_tok_s", "t_ctx_s"), 0.001)
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ValueError, match="the keys must be noise_sigma, num_kv_blocks, slow_s"):
        read_profile(str(path))
    values |= {"t_pair_s": 0.0, "noise_sigma": 0.0, "num_kv_blocks": 77}
    path.write_text(json.dumps(values), encoding="utf-8")
    profile = read_profile(str(path))
    assert (profile.name, profile.num_kv_blocks, profile.cost.t0_s) == ("mine", 77, 0.001)


def served(workload, options=None, **limits):
    small = settings(**limits)
    result = simulate(small, EXACT, workload, options or Options(keep_gaps=True))
    return Run(label="run", settings=small, workload=workload, result=result)


def test_measures_are_what_they_say():
    # As in the scenario computed by hand: 4.545, 5.42 and 3.6 ms.
    workload = Workload.of([0, 0.002, 0.020], [3, 2, 1], [2, 1, 1])
    run = served(workload, max_num_seqs=2, max_num_batched_tokens=4)
    everyone = measures.everyone(run)
    ms = pytest.approx
    assert measures.ttft(run, everyone) * 1_000 == ms([4.545, 7.965, 3.6])
    assert measures.e2e(run, everyone) * 1_000 == ms([9.965, 7.965, 3.6])
    assert measures.queue_time(run, everyone) * 1_000 == ms([0, 2.545, 0])
    assert measures.tpot(run, everyone) * 1_000 == ms([5.42])
    assert measures.itl(run, everyone) * 1_000 == ms([5.42], rel=1e-5)
    strict = measures.Target(ttft_s=0.005, tpot_s=0.005)
    assert measures.good(run, everyone, strict).tolist() == [False, False, True]
    assert measures.goodput(run, everyone, strict) == ms(1 / 0.0236)
    assert measures.throughput(run) == ms(10 / 0.0236)
    assert measures.mean_batch(run) == ms(4 / 3)
    assert measures.outcomes(run) == {"stop": 3}
    assert measures.bound_by(run) == "nothing: nobody waited"
    assert measures.jain(np.array([1.0, 1.0, 2.0])) == ms(16 / 18)
    assert math.isnan(measures.percentile(np.array([]), 50))


def test_what_bound_is_found_out():
    crowd = Workload.of(np.zeros(40), np.full(40, 64), np.full(40, 32))
    cases = {
        "slots": {"max_num_seqs": 2},
        "arithmetic": {"max_num_seqs": 40, "max_num_batched_tokens": 40},
        "memory": {"num_kv_blocks": 14},
    }
    for name, limits in cases.items():
        told = measures.bound_by(served(crowd, **limits))
        largest = max(re.findall(r"(\w+) (\d+)%", told), key=lambda found: int(found[1]))
        assert largest[0] == name, told


def test_overflow_is_the_share_that_lived_through_a_preemption():
    early = [0.0] * 4 + [60.0]
    workload = Workload.of(early, [64] * 5, [60] * 5)
    run = served(workload, num_kv_blocks=20)
    assert run.result.iteration_preemptions.sum() > 0
    overflow = measures.overflow(run)
    assert 0 < overflow < 1
    assert overflow * 5 == pytest.approx(round(overflow * 5))


def test_the_load_scales_to_the_capacity(files):
    trace = traces.read_trace(files[0])
    bench = Bench(
        profile=read_profile("gpu-8b"), trace=trace, batch=trace, load=0.5, seed=0, quiet=True
    )
    workload = bench.at_load(0.5)
    rate = (len(trace) - 1) / workload.arrival_s[-1]
    assert rate == pytest.approx(0.5 * bench.capacity(trace))
    run = bench.run("run", PolicyConfig(), workload)
    assert run.settings.max_num_seqs == 256
    assert run.result.ended("abort").sum() <= 6
