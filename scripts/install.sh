#!/bin/sh
# install.sh VENV VERSIONS WHAT ARGUMENTS...: make VENV if it is absent and install ARGUMENTS into it, for example
# -e '.[all]', in the versions of constraints/VERSIONS.txt.
#
# uv installs in a fraction of pip's time: the one on PATH, or one that pip brings into VENV. Where uv is not to be had
# or fails (it reads no pip.conf, so an index of its own or a certificate can be missing), pip installs.
# torch and torchvision are a pair there: beside a torch of another version, torchvision's compiled operators do not load.
set -eu
venv=$1 versions=constraints/$2.txt what=$3
shift 3
log=$venv/install.log

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"

quiet_pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

# One setting of pip, from its environment variable or pip.conf; empty if there is none.
pip_setting() {
	for key in ":env:.$1" "install.$1" "global.$1"; do
		"$venv/bin/python" -m pip config get "$key" 2>/dev/null && return
	done || true
}

with_uv() {
	uv=$(command -v uv || echo "$venv/bin/uv")
	[ -x "$uv" ] || quiet_pip install uv || return 1
	index=$(pip_setting index-url) certificate=$(pip_setting cert)
	[ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
	[ -z "$certificate" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$certificate}"
	"$uv" pip install --quiet --python "$venv/bin/python" -c "$versions" "$@"
}

# pip knows --group since 25.1.
with_pip() {
	quiet_pip install --upgrade 'pip>=25.1' -c "$versions" && quiet_pip install -c "$versions" "$@"
}

# Distributions of their own in earlier checkouts, which an environment may still have.
quiet_pip uninstall --yes ckpt-tools-training ckpt-tools-inference 2>/dev/null || true

echo "Installing $what into $venv ..."
if with_uv "$@" >"$log" 2>&1; then
	exit
fi
echo "uv cannot install it here ($log has its message): pip does, which takes about 4 minutes."
with_pip "$@"
