"""deploy/kubernetes and compose.yaml: valid by schema, and naming what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from bidmatch.cli import bidmatch
from service.settings import Settings

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
NOT_MANIFESTS = {"kustomization.yaml", "prometheus-adapter.yaml"}
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
VERSIONS = ("1.29", "1.31")


def manifests() -> dict[str, dict[str, Any]]:
    return {
        name: yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
        for name in KUSTOMIZATION["resources"]
    }


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [one for one in manifests().values() if one["kind"] == kind]
    return found


def test_every_manifest_is_listed() -> None:
    assert {path.name for path in FOLDER.glob("*.yaml")} == set(KUSTOMIZATION["resources"]) | NOT_MANIFESTS


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", KUSTOMIZATION["resources"])
def test_manifests_are_valid(name: str, version: str) -> None:
    kubernetes_validate.validate(manifests()[name], version, strict=True)


def test_the_validator_refuses_what_is_wrong() -> None:
    wrong = of_kind("Deployment")
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_what_belongs_together_has_one_label() -> None:
    deployment = of_kind("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert of_kind("Service")["spec"]["selector"] == labels
    assert of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    target = of_kind("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])


def test_containers_are_locked_down_and_mount_what_there_is() -> None:
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    volumes = {volume["name"] for volume in pod["volumes"]}
    images = {image["name"] for image in KUSTOMIZATION["images"]}
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert container["image"] in images
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}


def test_settings_and_commands_are_bidmatchs() -> None:
    known = {f"BIDMATCH_{name.upper()}" for name in Settings.model_fields}
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    (serve,) = pod["containers"]
    values = {one["name"]: one["value"] for one in serve["env"]}
    assert values.keys() <= known
    Settings.model_validate({name.removeprefix("BIDMATCH_").lower(): value for name, value in values.items()})
    (verify,) = [one for one in pod["initContainers"] if one["image"] == "bidmatch"]
    assert CliRunner().invoke(bidmatch, [verify["args"][0], "--help"]).exit_code == 0
    stack = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    values = stack["services"]["serve"]["environment"]
    assert values.keys() <= known
    Settings.model_validate({name.removeprefix("BIDMATCH_").lower(): value for name, value in values.items()})
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert set(re.findall(r"\bBIDMATCH_[A-Z_]+", text)) <= known


def test_pods_are_added_by_a_metric_that_there_is() -> None:
    (pods, _) = of_kind("HorizontalPodAutoscaler")["spec"]["metrics"]
    metric = pods["pods"]["metric"]["name"]
    guide = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    assert f"`{metric}`" in guide
    adapter = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text(encoding="utf-8"))
    assert adapter["rules"]["custom"][0]["seriesQuery"].startswith(metric + "{")


def test_prometheus_of_compose_is_the_other_with_another_address() -> None:
    folder = ROOT / "deploy" / "monitoring"
    one = yaml.safe_load((folder / "prometheus.yml").read_text(encoding="utf-8"))
    other = yaml.safe_load((folder / "compose.yml").read_text(encoding="utf-8"))
    assert other["scrape_configs"][0]["static_configs"][0].pop("targets") == ["serve:8000"]
    assert one["scrape_configs"][0]["static_configs"][0].pop("targets") == ["127.0.0.1:8000"]
    assert one == other
