# The HTTP server on the CPU (docs/guide/scale-out.md):
#   docker build -t tide_export .
#   docker run -p 8000:8000 -v "$PWD/out/demo:/bundle:ro" tide_export --model-name demo --slots 8
FROM python:3.11-slim
WORKDIR /build
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY packaging packaging
COPY cpp cpp
COPY plugins plugins
COPY tide_export tide_export
RUN apt-get update && apt-get install -y --no-install-recommends g++ && pip install --no-cache-dir -c constraints.txt '.[cpu,grammar,serve]' && apt-get purge -y --auto-remove g++ && rm -rf /var/lib/apt/lists/* /build/*
USER 65534
WORKDIR /
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["tide-export", "serve", "/bundle", "--host", "0.0.0.0"]
