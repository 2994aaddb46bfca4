"""docs/kubernetes and compose.yaml: what no schema of Kubernetes knows about our own settings.

`kubernetes-validate` checks the rest in `.ci/run`.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from msgspec.structs import replace

from gatekeeper import __version__
from gatekeeper.cli.settings import Settings
from gatekeeper.config import Config
from gatekeeper.sidecar.listening import diagnostics_address
from gatekeeper.sidecar.reload import check_config
from gatekeeper.sidecar.service import DIAGNOSTICS
from gatekeeper.terminal import identity_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "kubernetes"
FILES = {path.name: list(yaml.safe_load_all(path.read_text())) for path in FOLDER.glob("*.yaml")}
SCHEMA = json.loads((ROOT / "tests" / "vectors" / "servicemonitor.json").read_text())
OURS = f"ghcr.io/robots-gatekeeper/gatekeeper:{__version__}"


@pytest.fixture(params=sorted(FILES))
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return FILES[request.param]


def of_kind(manifests: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [one for one in manifests if one["kind"] in kinds]


def pods(manifests: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield the specification of each Pod, and its containers."""
    for one in of_kind(manifests, "Deployment", "StatefulSet"):
        spec = one["spec"]["template"]["spec"]
        yield spec, [*spec.get("initContainers", []), *spec["containers"]]


def ours(manifests: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the Pod with the gatekeeper, and its container."""
    [found] = [
        (spec, one) for spec, all_ in pods(manifests) for one in all_ if one["image"] == OURS
    ]
    return found


def config_of(manifests: list[dict[str, Any]]) -> Config:
    [made] = of_kind(manifests, "ConfigMap")
    return Config.from_dict(tomllib.loads(made["data"]["gatekeeper.toml"]))


def test_both_sets_of_manifests_are_present() -> None:
    assert sorted(FILES) == ["fleet.yaml", "sidecar.yaml"]


def test_the_configuration_is_valid_and_belongs_to_the_container(
    manifests: list[dict[str, Any]], tmp_path: Path
) -> None:
    config, (spec, container) = config_of(manifests), ours(manifests)
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    assert container["args"] == ["serve", "--config", "/etc/gatekeeper/gatekeeper.toml"]
    assert {"/etc/gatekeeper", "/var/lib/gatekeeper"} <= mounts
    server = config.server
    if server.token_file is not None:
        assert str(Path(server.token_file).parent) in mounts
        tokens = tmp_path / "tokens"
        tokens.write_text(f"crawler:crawl:{'a' * 64}\nprometheus:check:{'b' * 64}\n")
        tokens.chmod(0o440)
        config = replace(config, server=replace(server, token_file=str(tokens)))
        [service] = [
            one for one in of_kind(manifests, "Service") if one["metadata"]["name"] == "gatekeeper"
        ]
        assert f"gatekeeper:{server.port}" in server.allowed_hosts
        assert service["spec"]["sessionAffinity"] == "ClientIP"
    check_config(config, config.user_agent or "")
    assert spec["terminationGracePeriodSeconds"] > server.drain_timeout + server.drain_grace
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Mi"))
    assert config.cache.max_bytes * 2 < limit * 2**20


def test_probes_and_monitors_ask_the_listener_of_diagnostics(
    manifests: list[dict[str, Any]],
) -> None:
    config, (_, container) = config_of(manifests), ours(manifests)
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert (ports["diagnostics"],) == (diagnostics_address(config.server) or ())[1:]
    assert ports.get("api", config.server.port) == config.server.port
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[name]["httpGet"]
        assert asked["port"] == "diagnostics"
        assert asked["path"] in DIAGNOSTICS
    [monitor] = of_kind(manifests, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    [service] = [
        one for one in of_kind(manifests, "Service") if wanted <= one["metadata"]["labels"].items()
    ]
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {one["name"] for one in service["spec"]["ports"]}
    assert endpoint["path"] in DIAGNOSTICS
    assert ("authorization" in endpoint) == (config.server.token_file is not None)


def test_a_monitor_is_valid_by_the_schema_of_its_resource(manifests: list[dict[str, Any]]) -> None:
    [monitor] = of_kind(manifests, "ServiceMonitor")
    judge = jsonschema.Draft202012Validator(SCHEMA)
    judge.validate(monitor)
    for key, value in (("intervall", "30s"), ("interval", "soon"), ("params", "x")):
        wrong = copy.deepcopy(monitor)
        wrong["spec"]["endpoints"][0][key] = value
        assert not judge.is_valid(wrong), key


def test_no_container_has_rights_that_it_does_not_need(manifests: list[dict[str, Any]]) -> None:
    for spec, containers in pods(manifests):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for one in containers:
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= one["resources"]["requests"].keys()
            assert "memory" in one["resources"]["limits"]


def test_the_crawler_starts_after_its_sidecar_and_ends_before_it() -> None:
    spec, container = ours(FILES["sidecar.yaml"])
    assert container in spec["initContainers"]
    assert container["restartPolicy"] == "Always"
    assert config_of(FILES["sidecar.yaml"]).server.host == "127.0.0.1"


def test_the_image_has_the_extras_that_the_fleet_needs() -> None:
    assert "redis" in (ROOT / "Dockerfile").read_text().partition(".[")[2].partition("]")[0]


def test_compose_yaml_sets_existing_settings() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    settings = Settings.load(None, environ=services["gatekeeper"]["environment"])
    check_config(settings.config, identity_of(settings.config))
    assert not settings.ignored
    where = diagnostics_address(settings.config.server)
    assert where is not None
    assert services["gatekeeper"]["ports"] == [f"127.0.0.1:{where[1]}:{where[1]}"]
    assert services["crawler"]["network_mode"] == "service:gatekeeper"
    assert f"http://127.0.0.1:{settings.config.server.port}/" in services["crawler"]["command"]
