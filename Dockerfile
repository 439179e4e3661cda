# The serving image: `bidmatch serve` of the bundle mounted at /bundle. No torch, no compiler, no root.
#   docker build -t bidmatch .
#   docker run --read-only -p 127.0.0.1:8000:8000 -v "$PWD/runs/demo/bundle:/bundle:ro" -e BIDMATCH_AUTH=off bidmatch
# It listens on all addresses of the container, so it asks for keys unless told not to, as above: mount files of
# keys and name them in BIDMATCH_API_KEYS_FILE and BIDMATCH_ADMIN_KEYS_FILE. Live phrases need a volume that
# user 10001 may write, named in BIDMATCH_LIVE. Nothing else is written but to /dev/shm.

FROM python:3.11-slim AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python -m venv /opt/bidmatch
ENV PATH=/opt/bidmatch/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY constraints.txt pyproject.toml setup.py README.md LICENSE NOTICE ./
COPY bidmatch bidmatch
COPY trainer trainer
COPY export export
COPY service service
RUN pip install --constraint constraints.txt . \
    && pip uninstall --yes pip setuptools

FROM python:3.11-slim
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin bidmatch
COPY --from=build /opt/bidmatch /opt/bidmatch
ENV PATH=/opt/bidmatch/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    BIDMATCH_BUNDLE=/bundle \
    BIDMATCH_HOST=0.0.0.0 \
    BIDMATCH_PORT=8000
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=2m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['BIDMATCH_PORT'] + '/readyz', timeout=2)"]
ENTRYPOINT ["bidmatch"]
CMD ["serve"]
