# The sidecar as an image: no root, nothing writable but /var/lib/gatekeeper.
#
#   docker build -t gatekeeper .
#   docker run --read-only --cap-drop ALL --security-opt no-new-privileges \
#       --network container:my-crawler -v gatekeeper-state:/var/lib/gatekeeper gatekeeper
#
# It listens on 127.0.0.1:8750, so it shares the network of the crawler that asks it. For
# another address give it a token: GATEKEEPER_SERVER_HOST, GATEKEEPER_SERVER_TOKEN_FILE.
ARG PYTHON=python:3.13-slim

FROM ${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1
WORKDIR /src
RUN python -m venv /app
COPY pyproject.toml README.md LICENSE ./
COPY .ci/compile.py ./.ci/
COPY gatekeeper ./gatekeeper
RUN /app/bin/pip install '.[speed,psl,redis]' && /app/bin/python -m compileall -q /app/lib

FROM ${PYTHON}
LABEL org.opencontainers.image.title="gatekeeper" \
      org.opencontainers.image.description="Ask first, then wait until the host is due: a robots.txt gate for polite crawlers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/robots-gatekeeper/gatekeeper"
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    GATEKEEPER_STORAGE_PATH=/var/lib/gatekeeper/state.sqlite
RUN mkdir -m 0700 /var/lib/gatekeeper && chown 65532:65532 /var/lib/gatekeeper
COPY --from=build /app /app
USER 65532:65532
VOLUME ["/var/lib/gatekeeper"]
EXPOSE 8750
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s --retries=3 \
    CMD ["/app/bin/gatekeeper", "healthcheck"]
ENTRYPOINT ["/app/bin/gatekeeper"]
CMD ["serve"]
