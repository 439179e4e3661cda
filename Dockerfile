# Images of bidmatch:
#   docker build -t bidmatch .                        the service: no torch, no compiler, no root
#   docker build --target cuda -t bidmatch:cuda .     the same on a GPU, with CUDA's libraries; run it with --gpus all
#   docker build --target train -t bidmatch:train .   every command, training and export included
#   docker run --read-only -p 127.0.0.1:8000:8000 -v "$PWD/runs/demo/bundle:/bundle:ro" -e BIDMATCH_AUTH=off bidmatch
# The service listens on all addresses of the container, so it asks for keys unless told not to, as above: mount
# files of keys and name them in BIDMATCH_API_KEYS_FILE and BIDMATCH_ADMIN_KEYS_FILE. Live phrases need a volume
# that user 10001 may write, named in BIDMATCH_LIVE. Nothing else is written but to /dev/shm.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS wheels
# Extras of the serving images, with commas, such as milvus,traces.
ARG EXTRAS=traces
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY constraints.txt pyproject.toml ./
COPY deploy/requirements.py deploy/
# The CPU build of ONNX Runtime answers the same and is 280 MB smaller.
RUN python deploy/requirements.py "$EXTRAS" > serve.txt \
    && sed 's/^onnxruntime-gpu.*/onnxruntime/' serve.txt > cpu.txt \
    && pip wheel --constraint constraints.txt --requirement cpu.txt --wheel-dir /wheels/cpu
COPY setup.py README.md LICENSE NOTICE ./
COPY bidmatch bidmatch
COPY trainer trainer
COPY export export
COPY service service
RUN pip wheel --no-deps --wheel-dir /wheels/bidmatch .

FROM wheels AS serve-packages
RUN python -m venv /opt/bidmatch \
    && /opt/bidmatch/bin/pip install --no-index --find-links /wheels/cpu --requirement cpu.txt \
    && /opt/bidmatch/bin/pip install --no-deps /wheels/bidmatch/*.whl \
    && /opt/bidmatch/bin/pip uninstall --yes pip setuptools

FROM wheels AS cuda-packages
RUN python deploy/requirements.py cuda > cuda.txt \
    && python -m venv /opt/bidmatch \
    && /opt/bidmatch/bin/pip install --find-links /wheels/cpu --constraint constraints.txt \
        --requirement serve.txt --requirement cuda.txt \
    && /opt/bidmatch/bin/pip install --no-deps /wheels/bidmatch/*.whl \
    && /opt/bidmatch/bin/pip uninstall --yes pip setuptools

FROM wheels AS train-packages
# Where torch comes from beside PyPI: its builds for CPUs, a tenth of PyPI's, which carry CUDA. Training on a GPU:
# --build-arg TORCH_INDEX= (nothing), which leaves PyPI's.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# hnswlib is compiled for any x86-64 processor since 2013 (AVX2), and not, as it does by itself, for the builder's.
RUN case "$(uname -m)" in x86_64) export CFLAGS=-march=x86-64-v3 CXXFLAGS=-march=x86-64-v3 ;; esac \
    && export HNSWLIB_NO_NATIVE=1 \
    && python deploy/requirements.py train,traces > train.txt \
    && python -m venv /opt/bidmatch \
    && /opt/bidmatch/bin/pip install --find-links /wheels/cpu ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        --constraint constraints.txt --requirement train.txt \
    && /opt/bidmatch/bin/pip install --no-deps /wheels/bidmatch/*.whl \
    && /opt/bidmatch/bin/pip uninstall --yes pip

FROM ${BASE_IMAGE} AS base
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin bidmatch \
    && install --directory --owner bidmatch --group bidmatch /bundles /live /training
ENV PATH=/opt/bidmatch/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    ORT_DISABLE_TELEMETRY=1
USER 10001
ENTRYPOINT ["bidmatch"]

FROM base AS train
COPY --from=train-packages /opt/bidmatch /opt/bidmatch
ENV HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /training
CMD ["--help"]

FROM base AS service
ENV BIDMATCH_BUNDLE=/bundle \
    BIDMATCH_HOST=0.0.0.0 \
    BIDMATCH_PORT=8000
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=2m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['BIDMATCH_PORT'] + '/readyz', timeout=2)"]
CMD ["serve"]

FROM service AS cuda
COPY --from=cuda-packages /opt/bidmatch /opt/bidmatch
ENV BIDMATCH_PROVIDER=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM service AS serve
COPY --from=serve-packages /opt/bidmatch /opt/bidmatch
