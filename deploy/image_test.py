"""Builds the images, brings compose.yaml up with its monitoring, uses it from outside, and takes it down.

    make image-test            needs Docker with compose and buildx; from ten minutes on, most of it downloads

Variables: BASE_IMAGE and TORCH_INDEX as in the Dockerfile; BUILD_FLAGS, more flags for `docker build`;
PROMETHEUS_IMAGE, else compose.yaml's is pulled, and where that fails one is built from Debian's package;
GRAFANA_IMAGE, else Grafana is left out where its image can't be pulled; CUDA=1 builds that target, too.
The last line is all figures as JSON.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dashboard

ROOT = Path(__file__).parents[1]
PROJECT = "bidmatch-image-test"
IMAGES = {target: f"bidmatch-image-test:{target}" for target in ("serve", "train", "cuda", "prometheus")}
PORTS = {"PORT": 18000, "PROMETHEUS_PORT": 19090, "GRAFANA_PORT": 13000}
SERVICE, PROMETHEUS = (f"http://127.0.0.1:{PORTS[name]}" for name in ("PORT", "PROMETHEUS_PORT"))
JSON = {"Content-Type": "application/json"}


def say(words: str) -> None:
    """Tell what is done, on stderr."""
    print(words, file=sys.stderr, flush=True)


def docker(*arguments: str, fails: bool = False) -> str:
    """Stdout of a docker command; `fails`: it must end with an error."""
    done = subprocess.run(
        ["docker", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment()
    )
    if (done.returncode != 0) != fails:
        sys.exit(f"docker {shlex.join(arguments)} ended with {done.returncode}\n{done.stdout}")
    return done.stdout.strip()


def environment() -> dict[str, str]:
    """This process's, with the images and ports of the test for compose.yaml."""
    images = {"SERVE_IMAGE": IMAGES["serve"], "TRAIN_IMAGE": IMAGES["train"]}
    # The builder before BuildKit builds every stage, wanted or not.
    buildkit = {"DOCKER_BUILDKIT": "1"}
    return dict(os.environ) | buildkit | {name: str(port) for name, port in PORTS.items()} | images


def build(target: str, file: str = "Dockerfile") -> float:
    """Build an image: seconds."""
    say(f"building {target} ...")
    arguments = ["build", "--quiet", "--file", file, "--tag", IMAGES[target]]
    if file == "Dockerfile":
        arguments += ["--target", target]
    for name in ("BASE_IMAGE", "TORCH_INDEX"):
        if name in os.environ and (name == "BASE_IMAGE" or target == "train"):
            arguments += ["--build-arg", f"{name}={os.environ[name]}"]
    started = time.monotonic()
    docker(*arguments, *shlex.split(os.environ.get("BUILD_FLAGS", "")), ".")
    return time.monotonic() - started


def megabytes(target: str) -> float:
    """An image's size."""
    return int(docker("image", "inspect", "--format", "{{.Size}}", IMAGES[target])) / 1e6


def in_image(target: str, script: str) -> str:
    """What a shell script says in an image, on a read-only root."""
    return docker("run", "--rm", "--read-only", "--entrypoint", "sh", IMAGES[target], "-ec", script)


def compose(*arguments: str) -> str:
    """`docker compose` on the test's own project."""
    return docker("compose", "--project-name", PROJECT, "--profile", "monitoring", *arguments)


def call(url: str, body: Any = None) -> Any:
    """The answer to a request, POST where there is a body; JSON read."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, JSON), timeout=60) as answer:
        said = answer.read()
    return json.loads(said) if said.startswith((b"{", b"[")) else said.decode()


def wait(what: str, seconds: float, ready: Callable[[], bool]) -> float:
    """Seconds until something is so; where it is not in time, the test has failed."""
    started = time.monotonic()
    while True:
        try:
            if ready():
                return time.monotonic() - started
        except (OSError, urllib.error.URLError, ValueError):
            pass
        if time.monotonic() - started > seconds:
            say(compose("logs", "--tail", "50"))
            sys.exit(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


def check_images(figures: dict[str, Any]) -> None:
    """No root, no compiler, no torch where it is not wanted, nothing for one processor alone."""
    for target in ("serve", "train"):
        figures[f"{target}_mb"] = round(megabytes(target), 1)
        assert in_image(target, "id -u") == "10001", "runs as root"
        compilers = in_image(target, "for c in gcc g++ cc c++ clang; do command -v $c || true; done")
        assert not compilers, f"{target} has {compilers}"
    packages = "import importlib.util as u; print([n for n in ('torch', 'transformers') if u.find_spec(n)])"
    assert in_image("serve", f'python -c "{packages}"') == "[]"
    assert in_image("serve", "touch /opt/bidmatch/x 2>/dev/null && echo written || true") == ""
    in_image("train", "bidmatch --version")
    # Registers of AVX-512 would mean that hnswlib was compiled for the builder's processor.
    if shutil.which("objdump") and os.uname().machine == "x86_64":
        with tempfile.TemporaryDirectory() as folder:
            container = docker("create", IMAGES["train"])
            place = in_image("train", "python -c 'import hnswlib; print(hnswlib.__file__)'")
            docker("cp", f"{container}:{place}", f"{folder}/hnswlib.so")
            docker("rm", container)
            code = subprocess.run(["objdump", "-d", f"{folder}/hnswlib.so"], capture_output=True, text=True)
            assert "%ymm" in code.stdout, "hnswlib does not use AVX2"
            assert "%zmm" not in code.stdout, "hnswlib is compiled for AVX-512"


_LOAD_CUDA = """
import ctypes, onnxruntime
onnxruntime.preload_dlls()
library = onnxruntime.__path__[0] + "/capi/libonnxruntime_providers_"
ctypes.CDLL(library + "shared.so", ctypes.RTLD_GLOBAL)
try:
    ctypes.CDLL(library + "cuda.so")
except OSError as missing:
    print(missing)
"""


def check_cuda(figures: dict[str, Any]) -> None:
    """CUDA's libraries are all there but the driver's, which comes with the machine."""
    build("cuda")
    figures["cuda_mb"] = round(megabytes("cuda"), 1)
    said = in_image("cuda", f"python -c {shlex.quote(_LOAD_CUDA)} 2>&1")
    assert said == "" or said.startswith("libcuda.so.1: cannot open"), said


def images_of_monitoring() -> list[str]:
    """The services of the monitoring that can be had here."""
    services = ["prometheus"]
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    for name in ("PROMETHEUS", "GRAFANA"):
        if f"{name}_IMAGE" in os.environ:
            services += ["grafana"] * (name == "GRAFANA")
            continue
        image = re.findall(rf"{name}_IMAGE:-(\S+)}}", text)[0]
        pulled = subprocess.run(["docker", "pull", "--quiet", image], capture_output=True).returncode == 0
        if name == "PROMETHEUS" and not pulled:
            say(f"{image} can't be had here; Debian's package stands in")
            build("prometheus", "deploy/prometheus.Dockerfile")
            os.environ["PROMETHEUS_IMAGE"] = IMAGES["prometheus"]
        elif name == "GRAFANA" and pulled:
            services.append("grafana")
        elif name == "GRAFANA":
            say(f"{image} can't be had here: Grafana is left out")
    return services


def traffic(over: threading.Event, failed: list[BaseException]) -> None:
    """Something of all that the service counts, until it is over."""
    number = 0
    try:
        while not over.wait(0.1):
            for query in ("red garden hose", "red garden hose", f"cheap fan {number}"):
                call(f"{SERVICE}/match", {"query": query})
            phrase = {"id": "live-1", "text": f"red garden hose {number}"}
            call(f"{SERVICE}/phrases", {"phrases": [phrase]})
            if number % 50 == 1:
                call(f"{SERVICE}/admin/reload", {"bundle": "/bundles/demo"})
            with socket.create_connection(("127.0.0.1", PORTS["PORT"]), timeout=10) as stranger:
                stranger.sendall(b"this is not HTTP\r\n\r\n")
                stranger.recv(1000)
            number += 1
    except BaseException as failure:
        failed.append(failure)


def check_monitoring(figures: dict[str, Any], services: list[str]) -> None:
    """Prometheus scrapes and has the rules, every query of the dashboard has data, Grafana has it."""

    def up() -> bool:
        (target,) = call(f"{PROMETHEUS}/api/v1/targets")["data"]["activeTargets"]
        return target["health"] == "up"

    wait("Prometheus' target is up", 60, up)
    wanted = dashboard.expressions("30s")
    over, failed = threading.Event(), []
    caller = threading.Thread(target=traffic, args=(over, failed))
    caller.start()
    try:
        empty = wanted

        def answered() -> bool:
            nonlocal empty
            empty = dashboard.without_data(PROMETHEUS, empty)
            return not empty or bool(failed)

        figures["dashboard_queries"] = len(wanted)
        figures["dashboard_seconds"] = round(wait("every query of the dashboard has data", 180, answered), 1)
    finally:
        over.set()
        caller.join()
    assert not failed, failed
    groups = call(f"{PROMETHEUS}/api/v1/rules")["data"]["groups"]
    figures["alert_rules"] = sum(len(group["rules"]) for group in groups)
    if "grafana" in services:
        address = f"http://127.0.0.1:{PORTS['GRAFANA_PORT']}"
        wait("Grafana is there", 60, lambda: call(f"{address}/api/health")["database"] == "ok")
        assert call(f"{address}/api/dashboards/uid/bidmatch")["dashboard"]["panels"]


def check_stack(figures: dict[str, Any]) -> None:
    """compose.yaml from nothing, used, and again with what is there."""
    services = images_of_monitoring()
    compose("down", "--volumes", "--timeout", "5")
    say("docker compose up, without a bundle ...")
    started = time.monotonic()
    compose("up", "--detach", "--no-build", *services, "serve")
    wait("/readyz", 300, lambda: call(f"{SERVICE}/readyz") is not None)
    figures["up_with_demo_s"] = round(time.monotonic() - started, 1)
    answer = call(f"{SERVICE}/match", {"query": "red garden hose", "k": 5})
    assert answer["matches"], answer
    figures["matches"] = [match["phrase"] for match in answer["matches"]]
    container = compose("ps", "--quiet", "serve")
    health = ("inspect", "--format", "{{.State.Health.Status}}", container)
    wait("the container is healthy", 60, lambda: docker(*health) == "healthy")
    for path in ("/x", "/opt/bidmatch/x", "/bundles/x"):
        docker("exec", container, "touch", path, fails=True)
    call(f"{SERVICE}/phrases", {"phrases": [{"id": "kept", "text": "a phrase that stays"}]})
    check_monitoring(figures, services)

    say("stopping, and up again with what is there ...")
    started = time.monotonic()
    compose("stop", "serve")
    figures["stop_s"] = round(time.monotonic() - started, 1)
    compose("down")
    started = time.monotonic()
    compose("up", "--detach", "--no-build", "serve")
    wait("/readyz", 60, lambda: call(f"{SERVICE}/readyz") is not None)
    figures["up_again_s"] = round(time.monotonic() - started, 1)
    answer = call(f"{SERVICE}/match", {"query": "a phrase that stays", "k": 1})
    assert [match["id"] for match in answer["matches"]] == ["kept"], answer


def main() -> None:
    """Build, check, print the figures."""
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        sys.exit("image-test needs a Docker engine: `docker info` finds none")
    figures: dict[str, Any] = {}
    for target in ("train", "serve"):
        figures[f"{target}_build_s"] = round(build(target), 1)
    check_images(figures)
    if os.environ.get("CUDA") == "1":
        check_cuda(figures)
    try:
        check_stack(figures)
    finally:
        compose("down", "--volumes", "--timeout", "5")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
