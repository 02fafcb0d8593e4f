# sleepserve in a container, as docs/deploy.md tells it.
#
#   docker build -t sleepserve:cpu --build-arg TORCH=cpu .
#   docker build -t sleepserve:cuda .
#
# Nothing is downloaded when it starts: the demo model is in the wheel, others come with a volume.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build

# A folder of PyTorch's index: cpu, cu130, ... The extra `gpu` needs CUDA 13.
ARG TORCH=cu130
ARG TORCH_VERSION=2.13.0
# Of your own, in place of PyTorch's.
ARG TORCH_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_CONSTRAINT=/src/constraints.txt

WORKDIR /src
COPY constraints.txt ./
# First what is large and seldom changes. pip compiles the bytecode, which every process would else do again.
RUN python3 -m venv /opt/sleepserve \
    && /opt/sleepserve/bin/pip install "torch==${TORCH_VERSION}" \
        --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/${TORCH}}"

COPY pyproject.toml README.md LICENSE serve_config.yaml ./
COPY configs/demo.yaml configs/demo.yaml
COPY configs/demo/README.md configs/demo/README.md
COPY configs/demo/model configs/demo/model
COPY actors actors
COPY serve_app serve_app
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip wheel --no-deps --wheel-dir /wheels . \
    && if [ "${TORCH}" = cpu ]; then extras=; else extras='[gpu]'; fi \
    && /opt/sleepserve/bin/pip install "$(echo /wheels/sleepserve-*.whl)${extras}" \
    && /opt/sleepserve/bin/pip check


FROM ${PYTHON_IMAGE}

ARG TORCH=cu130
# tini collects orphans and passes signals on; wget is in the probes of older KubeRay operators; Triton compiles its
# launchers with a C compiler at run time. Debian's own fixes are wanted, so no versions are pinned. Older
# operators start Ray from a login shell, which has a PATH of its own.
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && if [ "${TORCH}" = cpu ]; then compiler=; else compiler='gcc libc6-dev'; fi \
    && apt-get install --yes --no-install-recommends tini wget ${compiler} \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 sleepserve \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/sleepserve \
        --shell /usr/sbin/nologin sleepserve \
    && install --directory --owner=10001 --group=10001 --mode=0750 /var/lib/sleepserve \
    && echo "PATH=/opt/sleepserve/bin:\${PATH}" > /etc/profile.d/sleepserve.sh

COPY --from=build /opt/sleepserve /opt/sleepserve
COPY configs/container/entrypoint.sh /usr/local/bin/sleepserve-entrypoint

# HF_HUB_OFFLINE: a start asks Hugging Face for nothing; `sleepserve download` is run with 0.
ENV PATH=/opt/sleepserve/bin:${PATH} \
    SLEEPSERVE_HOME=/var/lib/sleepserve \
    HF_HUB_OFFLINE=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Downloads and, as it is the user's home, the caches of compiled layers and kernels.
VOLUME /var/lib/sleepserve
WORKDIR /var/lib/sleepserve
USER 10001:10001
EXPOSE 8000

# Ctrl-C's: Ray ends in good order on it, and aborts on SIGTERM.
STOPSIGNAL SIGINT
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=6 \
    CMD ["wget", "--quiet", "--tries=1", "--timeout=4", "--output-document=/dev/null", "http://127.0.0.1:8000/ping"]

ENTRYPOINT ["tini", "--", "sleepserve-entrypoint"]
