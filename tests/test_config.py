"""Ranges of the settings, and where their values come from."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.config import EngineConfig, SchedulerLimits, ServerConfig, cache_dir
from jaxserve.errors import ConfigError
from jaxserve.settings import GROUPS, add_flags, parse_value, resolve_settings


def flags(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig, ServerConfig)
    return vars(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1M", 1_048_576),
        ("1.5k", 1_500),
        ("auto", None),
        ("-1", None),
        (-1, None),
        (7, 7),
    ],
)
def test_counts_are_read_as_vllm_reads_them(text: str | int, value: int | None) -> None:
    assert parse_value("max_model_len", text, "here") == value


@pytest.mark.parametrize(
    ("text", "value"), [("4GiB", 4 * 2**30), ("4 GiB", 4 * 2**30), ("4GB", 4 * 10**9), ("4G", 4 * 2**30), ("512MiB", 2**29), ("12B", 12)]
)
def test_sizes(text: str, value: int) -> None:
    assert parse_value("kv_cache_memory_bytes", text, "here") == value


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("max_model_len", "32q"),
        ("max_model_len", "1.0001k"),
        ("max_model_len", True),
        ("max_num_seqs", "0"),
        ("page_size", "16k"),
        ("page_size", "512"),
        ("gpu_memory_utilization", "nan"),
        ("gpu_memory_utilization", "1.5"),
        ("shutdown_timeout", "inf"),
        ("stall_timeout", "nan"),
        ("dtype", "int4"),
        ("dtype", ["float32"]),
        ("enable_prefix_caching", "maybe"),
        ("served_model_name", ["a", 3]),
        ("port", None),
        ("port", "65536"),
        ("data_parallel_size", "0"),
        ("data_parallel_size", "65"),
    ],
)
def test_a_bad_value_names_its_origin_and_itself(name: str, raw: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_value(name, raw, "settings.yaml")
    assert str(caught.value).startswith(f"settings.yaml: {name} ")


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max-model-len: 1k\nmax_num_seqs: 4\nport: 9000\ndtype: float32\nserved_model_name: [a, b]\n")
    environ = {"JAXSERVE_MAX_NUM_SEQS": "5", "JAXSERVE_PORT": "9001", "JAXSERVE_CACHE": "/somewhere", "HOME": "/"}
    settings = resolve_settings({"model": "m", "port": "9002", "config": file}, environ, file)
    assert settings.engine == EngineConfig(model="m", max_model_len=1000, max_num_seqs=5, dtype="float32")
    assert settings.server == ServerConfig(port=9002, served_model_name=("a", "b"))
    assert settings.origins == {
        "model": "--model",
        "port": "--port",
        "max_num_seqs": "JAXSERVE_MAX_NUM_SEQS",
        "max_model_len": str(file),
        "dtype": str(file),
        "served_model_name": str(file),
    }


def test_a_value_equal_to_its_default_has_no_origin() -> None:
    assert resolve_settings({"model": "m", "port": "8000"}, {}).origins == {"model": "--model"}


def other_values(spec: Field[Any]) -> list[Any]:
    """Three values of a setting, none of them its default."""
    low, high = spec.metadata["low"], spec.metadata["high"]
    if spec.metadata["choices"]:
        return [choice for choice in spec.metadata["choices"] if choice != spec.default]
    if isinstance(spec.default, bool):
        return [not spec.default]
    if isinstance(spec.default, tuple):
        return [("a",), ("b", "c"), ("d",)]
    if spec.name == "page_size":
        return [8, 32, 64]
    kind = next(part for part in (int, float, str) if part.__name__ in str(spec.type))
    if kind is str:
        return ["a", "b", "c"]
    return [
        value
        for i in (1, 2, 3)
        if (value := kind(high - i / 100 if kind is float and high is not None else (low or 0) + i)) != spec.default
    ]


SPECS = [spec for cls in (EngineConfig, ServerConfig) for spec in fields(cls) if spec.name != "model"]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_each_setting_in_each_source_and_their_order(spec: Field[Any], tmp_path: Path) -> None:
    values = other_values(spec)
    in_file, in_environment, in_flag = (values * 3)[:3]
    name, variable, flag = spec.name, f"JAXSERVE_{spec.name.upper()}", f"--{spec.name.replace('_', '-')}"
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({name: list(in_file) if isinstance(in_file, tuple) else in_file}))
    environ = {variable: ",".join(in_environment) if isinstance(in_environment, tuple) else str(in_environment)}
    if isinstance(in_flag, bool):
        given = flags(flag if in_flag else f"--no-{flag[2:]}")
    else:
        given = flags(flag, *(in_flag if isinstance(in_flag, tuple) else [str(in_flag)]))

    def resolved(flags: dict[str, Any], environ: dict[str, str], file: Path | None) -> tuple[Any, str | None]:
        settings = resolve_settings({"model": "m", **flags}, environ, file)
        return (vars(settings.engine) | vars(settings.server))[name], settings.origins.get(name)

    assert resolved({}, {}, None) == (spec.default, None)
    assert resolved({}, {}, file) == (in_file, str(file))
    assert resolved({}, environ, file) == (in_environment, variable)
    assert resolved(given, environ, file) == (in_flag, flag)


def test_every_default_is_written_once() -> None:
    """What the scheduler's limits have in common with the settings comes from them, and the command has no defaults of its own."""
    shared = {spec.name: spec.default for spec in fields(EngineConfig)}
    limits = Path(inspect.getfile(SchedulerLimits)).read_text().partition("class SchedulerLimits")[2].partition("\ndef ")[0]
    for spec in fields(SchedulerLimits):
        if spec.name in shared and spec.default is not MISSING:
            assert spec.default == shared[spec.name]
            assert f"= EngineConfig.{spec.name}\n" in limits, spec.name
    assert flags() == {}


def test_help_lists_every_flag_under_its_group() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig, ServerConfig)
    sections = {section.partition(":")[0]: section for section in parser.format_help().split("\n\n")}
    assert set(GROUPS.values()) <= set(sections)
    for spec in SPECS:
        section = sections[GROUPS[spec.metadata["group"]]]
        assert f"--{spec.name.replace('_', '-')}" in section, spec.name
        assert all(f"--{alias.replace('_', '-')}" in section for alias in spec.metadata["aliases"])


def test_keys_are_repeatable_and_never_shown(tmp_path: Path) -> None:
    settings = resolve_settings({"model": "m", **flags("--api-key", "k1", "k2", "--api-key", "k3")}, {})
    assert settings.server.api_key == ("k1", "k2", "k3")
    assert resolve_settings({"model": "m"}, {"JAXSERVE_API_KEY": "k1, k2"}).server.api_key == ("k1", "k2")
    file = tmp_path / "settings.yaml"
    file.write_text("api-key: [k1, k2]\n")
    from_file = resolve_settings({"model": "m"}, {}, file)
    assert from_file.server.api_key == ("k1", "k2")
    assert "k1" not in repr(from_file)
    file.write_text("api-key: [k1, 12345]\n")
    with pytest.raises(ConfigError, match="api_key is not readable; it must be a list of names") as caught:
        resolve_settings({"model": "m"}, {}, file)
    assert "k1" not in str(caught.value) and "12345" not in str(caught.value)
    parser = argparse.ArgumentParser()
    add_flags(parser, ServerConfig)
    assert "--api-key SECRET [SECRET ...]" in parser.format_help()


def test_an_empty_variable_is_not_given() -> None:
    assert resolve_settings({"model": "m"}, {"JAXSERVE_REVISION": ""}).engine.revision is None


def test_flags_of_vllm() -> None:
    given = flags("--no-enable-prefix-caching", "--block-size", "32", "--num-gpu-blocks-override", "99", "--served-model-name", "a", "b")
    settings = resolve_settings({"model": "m", **given}, {})
    assert (settings.engine.enable_prefix_caching, settings.engine.page_size, settings.engine.num_pages) == (False, 32, 99)
    assert settings.server.served_model_name == ("a", "b")


def test_every_setting_has_a_flag_that_reads_its_default_back() -> None:
    for cls in (EngineConfig, ServerConfig):
        for name, value in vars(cls(**({"model": "m"} if cls is EngineConfig else {}))).items():
            if name != "model" and value != ():
                assert parse_value(name, "auto" if value is None else str(value), "here") == value


@pytest.mark.parametrize(
    ("environ", "file", "message"),
    [
        ({"JAXSERVE_MAX_MODEL_LENGTH": "1"}, None, "JAXSERVE_MAX_MODEL_LENGTH. Did you mean JAXSERVE_MAX_MODEL_LEN?"),
        ({"JAXSERVE_CACHES": "1"}, None, "JAXSERVE_CACHES. Did you mean JAXSERVE_CACHE?"),
        ({}, "max-model-lne: 3", "'max-model-lne' in .* Did you mean max-model-len?"),
        ({}, "[1, 2]", "must hold names and values, not a list"),
        ({}, "a: [", "not valid YAML at line 1, column 5: "),
        ({}, "page_size: 16\nblock-size: 32", "page_size is given twice, once as block-size"),
        ({"JAXSERVE_PAGE_SIZE": "16", "JAXSERVE_BLOCK_SIZE": "32"}, None, "page_size is given twice, once as JAXSERVE_BLOCK_SIZE"),
        ({}, "page_size: 12", "page_size is 12; it must be a power of two"),
    ],
)
def test_what_is_unknown_or_wrong_is_named(tmp_path: Path, environ: dict[str, str], file: str | None, message: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(file or "")
    with pytest.raises(ConfigError, match=message):
        resolve_settings({"model": "m"}, environ, path)


def test_a_file_that_is_no_yaml_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("api_key: [sk-secret\nport: 1")
    with pytest.raises(ConfigError, match="not valid YAML at line 2") as caught:
        resolve_settings({"model": "m"}, {}, path)
    assert "sk-secret" not in str(caught.value)


def test_a_missing_file_and_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        resolve_settings({"model": "m"}, {}, tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="no model given"):
        resolve_settings({}, {})
    assert resolve_settings({}, {"JAXSERVE_MODEL": "m"}).engine.model == "m"


def test_http_only_and_grpc_only_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="both set"):
        ServerConfig(http_only=True, grpc_only=True)


def test_cache_dir_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "given"))
    assert cache_dir() == tmp_path / "given"
    assert (tmp_path / "given").stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("JAXSERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "jaxserve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "jaxserve"
    monkeypatch.setenv("JAXSERVE_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "home" / "mine"
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "file" / "x"))
    with pytest.raises(ConfigError, match="cannot make the cache directory"):
        cache_dir()
