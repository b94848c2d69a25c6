# Tokenmill's worker and command line. The build arguments are explained in docs/deployment.md.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# For the kernels, below. The image itself has no compiler.
RUN command -v g++ >/dev/null || { \
        apt-get update && apt-get install -y --no-install-recommends g++ \
        && rm -rf /var/lib/apt/lists/*; }
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv
WORKDIR /src
# From what changes least to what changes most: torch, the other requirements, our own code.
#
# For `cpu` the index of torch's small builds, without 3 GB of CUDA libraries; for `cuda` the package
# index itself, or the one of another CUDA release.
ARG VARIANT=cpu
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX_URL
RUN case "${VARIANT}" in \
        cpu) torch="torch==${TORCH_VERSION}+cpu"; index=https://download.pytorch.org/whl/cpu ;; \
        cuda) torch="torch==${TORCH_VERSION}"; index= ;; \
        *) echo "VARIANT is cpu or cuda" >&2; exit 1 ;; \
    esac \
    && index="${TORCH_INDEX_URL:-${index}}" \
    && pip install ${index:+--extra-index-url "${index}"} "${torch}"
COPY pyproject.toml deploy/requirements_of.py ./
RUN python requirements_of.py worker > requirements.txt && pip install -r requirements.txt
COPY README.md LICENSE ./
COPY client client
COPY engine engine
COPY worker worker
RUN pip install --no-deps .
# For processors with AVX2, with AVX-512, and with AMX as well; the worker takes the best that fits.
RUN case "$(uname -m)" in \
        x86_64) python -m tokenmill_engine.kernels.prebuilt \
            --level x86-64-v3 --level x86-64-v4 --level x86-64-v4-amx ;; \
    esac

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="Tokenmill" \
      org.opencontainers.image.description="Message-queue driven workers for language models" \
      org.opencontainers.image.licenses="Apache-2.0"
# Group 0 may write as well, so that a platform that picks its own user id still works.
RUN useradd --uid 10001 --gid 0 --create-home tokenmill \
    && mkdir -p /cache /models && chown 10001:0 /cache /models && chmod 0775 /cache /models
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false \
    USER=tokenmill \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    TOKENMILL_METRICS_HOST=0.0.0.0 \
    TOKENMILL_METRICS_PORT=9400
USER 10001:0
WORKDIR /home/tokenmill
VOLUME /cache
EXPOSE 9400
HEALTHCHECK --interval=5s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9400/healthz', timeout=4)"]
ENTRYPOINT ["tokenmill"]
CMD ["worker"]
