# An image with Spider and all packages that it needs. docs/cluster.md shows what to do with it.
#
#   docker build --tag spider .                                                 GPUs with driver 580 or newer
#   docker build --tag spider --build-arg PIP_EXTRA_INDEX_URL=$INDEX/cu126 .    GPUs with an older driver
#   docker build --tag spider --build-arg PIP_EXTRA_INDEX_URL=$INDEX/cpu .      no GPU
#
# docs/guide.md says where $INDEX is. The wheels of torch bring CUDA, so the image needs no CUDA of its own.
FROM debian:bookworm-slim

# torch.compile and Triton call a C++ compiler at run time. It needs the headers of Python.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ git make openssh-client python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /spider
COPY . .

ARG PIP_EXTRA_INDEX_URL
ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir --use-pep517 --constraint constraints.txt \
        --editable '.[cluster,hf,mirror,server]' --editable extras/lab --editable extras/trust

CMD ["snakemake", "--cores", "all"]
