# Stands in for prom/prometheus in `make image-test` where no registry of images is reached: Debian's package.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends prometheus \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner nobody --group nogroup /prometheus
USER nobody
EXPOSE 9090
ENTRYPOINT ["prometheus"]
