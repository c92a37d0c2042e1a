"""Settings: inheritance, options, and a clear line for whatever does not fit."""

import re

import pytest

from tests.support.refusals import refusal
from training.step.optimizer import peak_learning_rate
from training.tasks import build_task
from utils import yaml_files
from utils.command_line import ELSEWHERE
from utils.config import SPLITS, Config, differing_keys, load_config, read_named_config, write_config
from utils.errors import UsageError, run_main
from utils.layout import Layout
from utils.yaml_files import ROOT, yaml


def test_base_is_the_reference_experiment():
    config = load_config([])
    assert (config.embed_dim, config.depth, config.patch_size, config.num_heads, config.mlp_ratio) == (384, 12, 8, 8, 4)
    assert (config.img_size, config.dt, config.n_in_channels, config.n_out_channels) == ([360, 720], 1, 20, 20)
    assert (config.global_batch_size, config.num_iters, config.lr, config.betas) == (16, 30000, 5e-4, [0.9, 0.95])
    assert (config.optimizer, config.lr_schedule, config.warmup, config.dropout) == ("Adam", "cosine", 0, 0)


def test_short_inherits_from_base():
    short = load_config(["--config=short"])
    assert (short.limit_nsamples, short.limit_nsamples_val, short.num_iters) == (512, 128, 128)
    assert short.embed_dim == 384


def test_options_win_over_the_file_and_booleans_go_both_ways(tmp_path):
    words = ["--lr=1e-3", "--img_size", "64", "128", "--clip_grad_norm", "1", "--run_num", "07", "--enable_jit"]
    config = load_config(words)
    assert (config.lr, config.img_size, config.clip_grad_norm, config.run_num) == (1e-3, [64, 128], 1.0, "07")
    assert config.enable_jit
    file = tmp_path / "on.yaml"
    write_config(config, file)
    assert not load_config(["--yaml_config", str(file), "--no-enable_jit"]).enable_jit
    assert load_config(["--yaml_config", str(file), "--clip_grad_norm", "null"]).clip_grad_norm is None


def test_every_key_is_an_option():
    for name, field in Config.model_fields.items():
        if field.annotation is bool:
            strategy = "fsdp" if name == "cpu_offload" else "ddp"
            words = [f"--{name}", f"--data_parallel={strategy}", "--loss=squared_error", "--weight_decay=0.05"]
            assert getattr(load_config(words), name) is True
            assert getattr(load_config([f"--no-{name}"]), name) is False
        elif field.default == []:
            assert getattr(load_config([f"--{name}"]), name) == []
        elif name != "config":
            with refusal(f"argument --{name}.*: expected"):
                load_config([f"--{name}"])


def test_the_resolved_config_reads_back_equal(tmp_path):
    config = load_config(["--config=quick", "--lr=3e-5"])
    write_config(config, tmp_path / "config.yaml")
    again = load_config(["--yaml_config", str(tmp_path / "config.yaml"), "--config=quick"])
    assert again == config


def test_local_batch_size_sets_the_global_one_on_one_device():
    assert load_config(["--local_batch_size=4"]).global_batch_size == 4


def test_only_settings_that_change_the_result_count_as_different():
    one, other = load_config([]), load_config(["--num_data_workers=3", "--lr=1", "--depth=2", "--log_every=1"])
    assert differing_keys(one, other) == ["depth", "lr"]


CLASSIFY = ["--task=classify", "--model=classifier"]


@pytest.mark.parametrize(
    ("ranks", "words", "line"),
    [
        (3, [], "config/ViT.yaml: base: global_batch_size 16 cannot be shared by 3 ranks: it is not a multiple of 3"),
        (4, ["--gradient_accumulation=3"], "by 4 ranks in 3 micro-batches: it is not a multiple of 12"),
        (4, ["--data_parallel=hsdp", "--dp_shard=3"], "4 data-parallel ranks cannot be split into groups of 3"),
        (
            8,
            ["--tensor_parallel=3", "--context_parallel=2"],
            "8 ranks cannot be split as tp 3 x cp 2 x dp: 8 is not a m",
        ),
        (
            8,
            ["--row_parallel_size=4", "--local_batch_size=3", "--global_batch_size=4"],
            "is not local_batch_size 3 x 2 d",
        ),
        (
            4,
            ["--tensor_parallel=4", "--parallel_order=tp-xx"],
            "parallel_order 'tp-xx': name each of dp, cp, domain, ens, tp, pp at m",
        ),
        (
            4,
            ["--tensor_parallel=2", "--tp_backend=dtensor"],
            "tp_backend dtensor goes with data_parallel zero2, fsdp or",
        ),
        (
            4,
            ["--tensor_parallel=2", "--enable_jit", "--dropout=0.1"],
            "enable_jit with dropout and tensor_parallel needs",
        ),
        (
            4,
            ["--pipeline_parallel=4"],
            "over 4 stages needs at least as many .* give a --gradient_accumulation of 4 or more",
        ),
        (
            2,
            ["--tensor_parallel=2", "--tp_backend=dtensor", "--amp_mode=fp16"],
            "tp_backend dtensor goes without amp_mode fp16",
        ),
        (
            2,
            ["--data_parallel=fsdp", "--enable_channels_last"],
            "enable_channels_last belongs to data_parallel ddp and",
        ),
        *(
            (4, [f"--{way}_parallel=2", "--amp_mode=fp8"], "fp8 goes with data parallelism alone: use bf16 where")
            for way in ("tensor", "context", "pipeline", "domain")
        ),
        (4, ["--domain_parallel=3"], "4 ranks cannot be split as domain 3 x dp: 4 is not a multiple of 3"),
        (8, ["--domain_parallel=2x3"], "8 ranks cannot be split as domain 2x3 x dp: 8 is not a multiple of 6"),
        (2, ["--domain_parallel=2x"], "domain_parallel '2x': expected ranks along latitude, or 2x2"),
        (1, ["--prefetch=1"], "prefetch belongs to data_parallel zero2 and fsdp and hsdp, not to ddp"),
        (1, ["--noddp", "--data_parallel=fsdp"], "noddp belongs to data_parallel ddp, not to fsdp"),
        (1, ["--lr_scaling=sqrt"], "lr_scaling sqrt needs base_batch_size"),
        *(
            (2, ["--pipeline_parallel=2", "--gradient_accumulation=2", *steps], "2: a pipeline trains one step, of the")
            for steps in (["--rollout_steps=2"], ["--rollout_schedule", "[3, 2]"], ["--predict=change"])
        ),
        (2, ["--img_size", "8", "8", "8"], r"base: img_size \[8, 8, 8\]: forecasts are of latitude and longitude"),
        (2, CLASSIFY, "base: task classify needs num_classes"),
        (2, [*CLASSIFY, "--num_classes=3", "--context_parallel=2"], "task classify goes without context_parallel"),
        (2, ["--task=classfy"], r"task 'classfy' \(did you mean 'classify'\?\): there are classify, forecast"),
        (
            2,
            ["--model=unnet"],
            r"model 'unnet' \(did you mean 'unet'\?\): give one of vit, .*, or package.module:Class",
        ),
        (2, ["--model=networks.vit:Vit"], "model 'networks.vit:Vit': cannot be imported: .*Vit"),
        (2, ["--model=no.where:Model"], "model 'no.where:Model': cannot be imported: No module named 'no'"),
        (
            2,
            ["--model=torch.nn:Linear"],
            "base: Linear.__init__.. missing 2 required positional arguments: 'in_features' and",
        ),
        (2, ["--model=neighborhood", "--model_args={kernel: 3}"], "model_args: neighborhood takes no 'kernel'"),
        (
            2,
            ["--model=neighborhood", "--model_args={kernel_size: 4}"],
            "base: model neighborhood fails .* kernel_size 4 .* the kernel is odd",
        ),
        (
            2,
            ["--task=classify", "--num_classes=3"],
            r"output is \[1, 3\] for one sample; that of model vit is \[1, 20",
        ),
        (1, ["--config=quik"], r"config/ViT.yaml: no config 'quik' \(did you mean 'quick'\?\); it has base, short, "),
        (1, ["--embed_dims=3"], r"unknown option '--embed_dims' \(did you mean '--embed_dim'\?\)"),
        (1, ["--embed_dim=x"], "command line: embed_dim: 'x' should be a valid integer"),
        (1, ["--embed_dim=1.5"], "embed_dim: 1.5 should be a valid integer"),
        (1, ["--num_iters=0"], "num_iters: 0 should be greater than or equal to 1"),
        (
            1,
            ["--channel_weights={t2m:2}"],
            "channel_weights: 't2m:2' has no value: give a space after the colon, {t2m: 2}",
        ),
        (1, ["--lr=nan"], "lr: 'nan' should be a valid number"),
        (1, ["--lr=.inf"], "lr: inf should be a finite number"),
        (1, ["--amp_mode=fp4"], "amp_mode: 'fp4' should be 'none', 'bf16', 'fp16' or 'fp8'"),
        (1, ["--img_size", "3"], "img_size: .* at least 2 items"),
        (1, ["--yaml_config=nope.yaml"], "nope.yaml: No such file"),
        (1, ["--depth"], "argument --depth: expected one argument"),
        (
            1,
            ["--local_batch_size=4", "--global_batch_size=8"],
            "global_batch_size 8 is not local_batch_size 4 x 1 ranks",
        ),
        (1, ["--batch_size=16"], "there is no '--batch_size' here: use --global_batch_size .* or --local_batch_size"),
        (1, ["--tensor-model-parallel-size", "2"], "there is no '--tensor-model-parallel-size' here: use train_mp.py"),
        (1, ["--use_shifter"], "there is no '--use_shifter' here: use CONTAINER=shifter"),
        (1, ["--enable_apex"], "there is no '--enable_apex' here: use --enable_fused"),
        (1, ["--learning_speed=3"], r"unknown option '--learning_speed'$"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(ranks, words, line):
    with refusal(line):
        build_task(load_config(words, world_size=ranks, splits=SPLITS))


@pytest.mark.parametrize(
    ("words", "dims"),
    [
        ([], "dp_replicate 1, dp_shard 8, tp 1"),
        (["--data_parallel=hsdp"], "dp_replicate 2, dp_shard 4, tp 1"),
        (["--data_parallel=hsdp", "--dp_shard=2"], "dp_replicate 4, dp_shard 2, tp 1"),
        (["--tensor_parallel=4"], "dp_replicate 1, dp_shard 2, tp 4"),
        (["--tensor_parallel=4", "--parallel_order=dp-tp"], "tp 4, dp_replicate 1, dp_shard 2"),
        (["--domain_parallel=2x2", "--tensor_parallel=2"],
         "dp_replicate 1, dp_shard 1, domain_lat 2, domain_lon 2, tp 2"),
    ],
)  # fmt: skip
def test_the_mesh_of_eight_ranks_on_two_nodes(words, dims):
    layout = load_config(words, world_size=8, splits=SPLITS).layout(8, ranks_per_node=4)
    sizes = layout.mesh_dims
    assert ", ".join(f"{name} {size}" for name, size in sizes.items() if name in dims) == dims


def test_groups_of_a_layout_are_those_of_the_order():
    layout = Layout(8, tp=4, order="tp-dp")
    assert layout.groups("tp").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.groups("dp").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert "tp           2 x 4  inside a node" in layout.table(ranks_per_node=4)
    assert "dp           4 x 2  4 of 4 cross nodes" in layout.table(ranks_per_node=4)


@pytest.mark.parametrize(
    ("name", "lr"), [("bs16_opt", 5e-4), ("bs64_opt", 1e-3), ("bs256_opt", 2e-3), ("bs1024_opt", 4e-3)]
)
def test_the_learning_rate_grows_with_the_root_of_the_batch(name, lr):
    assert peak_learning_rate(load_config([f"--config={name}"])) == pytest.approx(lr)


def test_a_folder_without_configs_takes_those_of_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    depth = load_config(["--config=quick"]).depth
    own = yaml().load((ROOT / "config/ViT.yaml").read_text())
    own["quick"]["depth"] = depth + 1
    (tmp_path / "config").mkdir()
    with open("config/ViT.yaml", "w") as file:
        yaml().dump(own, file)
    assert load_config(["--config=quick"]).depth == depth + 1


def test_named_configs_of_the_repository_are_all_valid():
    for name in yaml().load(open("config/ViT.yaml")):
        load_config([f"--config={name}"])
        assert read_named_config("config/ViT.yaml", name)


def test_the_tutorials_name_of_the_quick_sibling_is_an_alias():
    words = ["--yaml_config=config/mp.yaml"]
    one, other = (load_config([*words, f"--config={name}"]) for name in ("mp_short", "short_mp"))
    assert one.model_dump(exclude={"config"}) == other.model_dump(exclude={"config"})


def test_every_number_of_the_schema_has_bounds():
    """A slip of the hand is one line, and not a model that fills the machine."""

    def numbers(schema):
        if schema.get("type") in ("integer", "number"):
            yield schema
        for inner in [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())]:
            yield from numbers(inner)

    for name, schema in Config.model_json_schema()["properties"].items():
        for number in numbers(schema):
            merged = schema | number
            assert {"minimum", "exclusiveMinimum"} & set(merged) and {"maximum", "exclusiveMaximum"} & set(merged), name
    for name, field in Config.model_fields.items():  # of two bounds of one kind, that of the type would win
        kinds = [type(bound) for bound in field.metadata]
        assert len(kinds) == len(set(kinds)), name


def test_a_file_is_parsed_once_and_who_reads_it_has_a_copy_of_his_own(monkeypatch, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("one: {values: [1, 2]}")
    first = read_named_config(path, "one")
    monkeypatch.setattr(yaml_files, "yaml", None)  # nothing is parsed any more
    first["values"].append(3)
    assert read_named_config(path, "one") == {"values": [1, 2]}
    monkeypatch.undo()
    path.write_text("one: {values: []}")
    assert read_named_config(path, "one") == {"values": []}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: {lr: 2020-13-45}", "cannot be read as YAML: "),
        ("a: {lr: !!int abc}", "cannot be read as YAML: "),
        ("a: {1: 2}", "1 is not a name: put it in quotes"),
        ("1: {a: 2}", "1 is not a name: put it in quotes"),
        ("a: {[1]: 2}", "is not a name: put it in quotes"),
        ("a: \x00", "cannot be read as YAML: "),
        ("a: \x07", "cannot be read as YAML: "),
        ("a: " + "{a: " * 1500 + "1" + "}" * 1500, "cannot be read as YAML: "),
        ("a:\n  embed_dims: 3\n", "a: unknown key 'embed_dims' (did you mean 'embed_dim'?)"),
        ("a:\n  embed_dim: 3\n", "a: key 'depth' is missing"),
        ("a: {<<: *b}\n", "line 1: found undefined alias"),
        ("a:\n  depth: 1\n  depth: 2\n", "line 3: found duplicate key"),
        ("a: 3\n", "expected named configs"),
        ("- a\n", "expected named configs"),
        ("", "expected named configs"),
    ],
    ids=range(15),
)
def test_yaml_of_any_kind_is_one_line(tmp_path, text, line):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with refusal(re.escape(line), path):
        load_config([f"--yaml_config={path}", "--config=a"])


def test_a_wrong_type_in_the_file_names_file_and_key(tmp_path):
    write_config(load_config([]), tmp_path / "f.yaml")
    text = (tmp_path / "f.yaml").read_text().replace("depth: 12", "depth: '12'")
    (tmp_path / "f.yaml").write_text(text)
    with refusal("f.yaml: base: depth: '12' should be a valid integer"):
        load_config(["--yaml_config", str(tmp_path / "f.yaml")])


def test_control_characters_of_a_value_are_escaped(capsys):
    with pytest.raises(SystemExit):
        run_main(lambda: load_config(["--config=quick", "--lr", "x\x1b[31m\n" * 10]))
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "\x1b" not in error


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_option_of_another_program_is_answered_with_options_that_exist(name):
    with pytest.raises(UsageError, match=f"there is no '--{name}' here: use ") as refused:
        load_config([f"--{name}"])
    answer = str(refused.value).partition(" here: use ")[2]
    named = set(re.findall(r"(?<!\w)--(\w+)", answer))
    assert named <= {"yaml_config", "nproc_per_node", *Config.model_fields}
    is_in_another_way = answer.startswith(("no option: ", "python benchmark.py", "CONTAINER="))
    assert named or is_in_another_way
