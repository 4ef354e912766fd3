# hf-zero with its native core, for GPUs of NVIDIA: `docker build -t hf-zero .`, then
# `docker run --gpus all --ipc host hf-zero hf-zero doctor`. The extras of pyproject.toml:
# `docker build --build-arg EXTRAS=trl,peft,data -t hf-zero .`.
ARG PYTHON=3.11

FROM python:${PYTHON}-bookworm AS build
WORKDIR /src
COPY . .
RUN bash scripts/image build /wheels

FROM python:${PYTHON}-slim-bookworm
ARG EXTRAS=""
# --build-arg VERSION=$(cat VERSION) --build-arg REPOSITORY=$(python scripts/repository.py)
ARG VERSION=""
ARG REPOSITORY=""
LABEL org.opencontainers.image.title="hf-zero" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.source="${REPOSITORY}"
COPY --from=build /wheels /wheels
# Triton calls a C compiler at run time, torch.compile on CPUs one of C++.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && bash /wheels/image install /wheels "${EXTRAS}" \
    && rm -r /wheels \
    && useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /home/trainer
CMD ["hf-zero", "doctor"]
