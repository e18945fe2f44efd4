# phi4mm with the exact versions and hashes of requirements-run.lock, as a user without rights.
#
#   docker build -t phi4mm .
#   docker run --rm -v "$PWD:/work" -u "$(id -u):$(id -g)" phi4mm build cpu-int8 --model checkpoint -o package
#
# A base pinned by digest: docker build --build-arg BASE=python:3.11-slim@sha256:... .
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ENV PHI4MM_HOME=/opt/phi4mm
ENV PIP_NO_CACHE_DIR=1
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements-run.lock ${PHI4MM_HOME}/source/
RUN python -m venv "$PHI4MM_HOME/venv"
RUN "$PHI4MM_HOME/venv/bin/pip" install --require-hashes -r "$PHI4MM_HOME/source/requirements-run.lock"
COPY pyproject.toml README.md LICENSE ${PHI4MM_HOME}/source/
COPY phi4mm_export ${PHI4MM_HOME}/source/phi4mm_export
RUN "$PHI4MM_HOME/venv/bin/pip" install --no-deps --no-build-isolation "$PHI4MM_HOME/source"

FROM ${BASE}
ENV PHI4MM_HOME=/opt/phi4mm
COPY --from=build ${PHI4MM_HOME}/venv ${PHI4MM_HOME}/venv
ENV PATH=${PHI4MM_HOME}/venv/bin:${PATH}
ENV HF_HOME=/tmp/huggingface
RUN phi4mm --version
USER 10001:10001
WORKDIR /work
ENTRYPOINT ["phi4mm"]
