# On a processor:  docker build -t locality .
# With CUDA:       docker build -t locality --build-arg TORCH_INDEX= --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 .
# Then:            docker run --rm -v "$PWD/runs:/app/runs" locality train digits
ARG BASE=debian:13-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/locality
COPY requirements.lock pyproject.toml README.md LICENSE ./
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir \
    ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} --requirement requirements.lock
COPY src src
RUN /opt/venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation .
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
ENTRYPOINT ["locality"]
CMD ["--help"]
