# An image with this package, for `launcher.image`.
#
#   docker build -t speechtrain .                                                      # CPU
#   docker build -t speechtrain --build-arg BASE=pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime .
#   docker build -t speechtrain --build-arg BASE=vault.habana.ai/gaudi-docker/1.23.0/ubuntu24.04/habanalabs/pytorch-installer-2.9.0:latest .
#   docker run --rm -v "$PWD/runs:/work/runs" speechtrain speechtrain train recipe=demo
#   docker build -t speechtrain-notebook --build-arg EXTRAS=interop,notebook .
#   docker run --rm -p 8888:8888 speechtrain-notebook \
#     jupyter lab --allow-root --ip=0.0.0.0 /opt/speechtrain/examples/notebook.ipynb
#
# The torch of a base image stays. A base image without torch gets the CPU build.
ARG BASE=python:3.11-slim
FROM ${BASE}

# Extras of pyproject.toml, separated by commas. notebook adds JupyterLab.
ARG EXTRAS=interop
ARG TORCH=2.13.0
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

COPY . /opt/speechtrain
WORKDIR /opt/speechtrain

RUN python3 -c "import torch" 2>/dev/null || python3 tools/install_torch.py ${TORCH} https://download.pytorch.org/whl/cpu
RUN python3 -c "import torch; print(f'torch=={torch.__version__}')" > constraints.txt
RUN python3 -m pip install --quiet -c constraints.txt -e ".[${EXTRAS}]"
RUN speechtrain train --version

WORKDIR /work
CMD ["speechtrain", "--help"]
