"""The pinned OpenCode binary: one file from the npm registry, checked against its integrity hash.

    python3 -m recipe.opencode_binary     # fetches it once, prints its path

npm's `opencode-ai` is a launcher that pulls two 185 MB binaries in a post-install script; the platform package
`opencode-linux-x64` holds the one that is needed, self-contained (58 MB packed, no Node). Settings: OPENCODE_VERSION,
OPENCODE_INTEGRITY, CACHE_DIR; the registry is npm's own setting (NPM_CONFIG_REGISTRY or .npmrc).

Standard library only. Exit codes: 0 ok, 64 wrong settings, 69 it could not be fetched.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import http.client
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE

PACKAGE = "opencode-linux-x64"
MEMBER = "package/bin/opencode"
DEFAULT_REGISTRY = "https://registry.npmjs.org"
ATTEMPTS = 3
TIMEOUT_S = 60  # of one read, not of the whole download


class BinaryError(RuntimeError):
    """The binary could not be provided; the message says why and what to do."""


def registry() -> str:
    """npm's registry as this machine has it, without a trailing slash."""
    url = next((value for name, value in os.environ.items() if name.lower() == "npm_config_registry" and value), "")
    if not url and (npm := shutil.which("npm")):
        done = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True, timeout=60,
                              stdin=subprocess.DEVNULL)
        url = done.stdout.strip() if done.returncode == 0 else ""
    return (url if url.startswith("http") else DEFAULT_REGISTRY).rstrip("/")


def tarball_url(version: str) -> str:
    return f"{registry()}/{PACKAGE}/-/{PACKAGE}-{version}.tgz"


def sha512_hex(integrity: str) -> str:
    """The hex digest in an npm integrity string ("sha512-<base64>"). Raises BinaryError for another form."""
    algorithm, _, encoded = integrity.partition("-")
    try:
        digest = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        digest = b""
    if algorithm != "sha512" or len(digest) != 64:
        raise BinaryError(f"OPENCODE_INTEGRITY={integrity!r} is not of the form sha512-<base64>: "
                          f"copy it from `npm view {PACKAGE}@<version> dist.integrity`")
    return digest.hex()


def binary_path(settings: Settings) -> Path:
    """Where the pinned binary lies once fetched. The hash is part of it, so another pin is another file."""
    digest = sha512_hex(settings.opencode_integrity)
    return settings.cache_path / "opencode" / f"{settings.opencode_version}-{digest[:12]}" / "opencode"


def ensure_binary(settings: Settings) -> Path:
    """The pinned binary, fetched if it is not there yet; several processes may ask at once. Raises BinaryError."""
    path = binary_path(settings)
    if path.is_file():
        return path
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise BinaryError(f"OpenCode is pinned for Linux x86-64; this is {platform.system()} {platform.machine()}")
    url = tarball_url(settings.opencode_version)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as scratch:
            tarball, binary = Path(scratch, "package.tgz"), Path(scratch, "opencode")
            digest = _download(url, tarball)
            if digest != sha512_hex(settings.opencode_integrity):
                raise BinaryError(
                    f"{url} does not have the pinned hash: expected {settings.opencode_integrity}, got sha512-"
                    f"{base64.b64encode(bytes.fromhex(digest)).decode()}. Nothing was kept. If OPENCODE_VERSION was "
                    "changed on purpose, set OPENCODE_INTEGRITY to that version's hash")
            _unpack(tarball, binary)
            binary.replace(path)  # atomic: another process sees the whole file or none
    except OSError as err:
        if err.errno == errno.ENOSPC:
            raise BinaryError(f"no space left under {settings.cache_path} for OpenCode (250 MB while unpacking): "
                              "free some, or set CACHE_DIR to a larger disk") from err
        raise BinaryError(f"cannot write OpenCode under {settings.cache_path}: {err}. "
                          "Set CACHE_DIR to a writable folder") from err
    return path


def _download(url: str, target: Path) -> str:
    """Streams `url` into `target`; the SHA-512 of what came, in hex."""
    problem: Exception | None = None
    for _ in range(ATTEMPTS):
        sha = hashlib.sha512()
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, target.open("wb") as file:
                while block := response.read(1 << 20):
                    sha.update(block)
                    file.write(block)
                if response.length:
                    raise http.client.IncompleteRead(b"", response.length)  # read(n) does not tell
            return sha.hexdigest()
        except urllib.error.HTTPError as err:
            problem = err
            if err.code < 500:
                break  # asking again will not help
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as err:
            problem = err
    raise BinaryError(f"cannot fetch {url}: {problem}. Check the network and npm's registry setting "
                      "(NPM_CONFIG_REGISTRY), or set OPENCODE_BIN to an existing OpenCode binary")


def _unpack(tarball: Path, binary: Path) -> None:
    with tarfile.open(tarball) as archive:
        member = next((m for m in archive if m.name == MEMBER and m.isfile()), None)
        source = member and archive.extractfile(member)
        if not source:
            raise BinaryError(f"the package holds no {MEMBER}: this OPENCODE_VERSION is packed in another way")
        with binary.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    binary.chmod(0o755)


def main() -> int:
    if len(sys.argv) > 1:
        print(__doc__)
        return 0 if sys.argv[1] in ("-h", "--help") else EXIT_USAGE
    try:
        print(ensure_binary(Settings.load()))
    except SettingsError as err:
        print(f"Settings are wrong, nothing was fetched:\n{err}", file=sys.stderr)
        return EXIT_USAGE
    except BinaryError as err:
        print(err, file=sys.stderr)
        return EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
