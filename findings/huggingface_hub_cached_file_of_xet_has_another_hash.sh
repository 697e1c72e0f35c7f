#!/usr/bin/env bash
# The path of a cached file of the hub no longer ends with its SHA-256: files of Xet lie in a store of their own.
#
# Guess:     `os.path.realpath` of what `hf_hub_download` returns is a file in `blobs` that is named by the SHA-256 of
#            a large file, so a cache can be verified without a network by comparing name and content.
# Behaviour: `blobs/SHA-256` of a file that Xet keeps is a link too. It leads to a store that all
#            repositories of the cache share, where the name is the hash of Xet. It has 64 hexadecimal digits as well,
#            so the comparison calls every intact file corrupt. The first link has the SHA-256.
#            HF_HUB_DISABLE_SHARED_BLOBS=1 keeps the layout of earlier versions.
# Seen with: huggingface_hub 2.4.0, hf-xet 1.8.0, Python 3.11, a hub on loopback whose Xet storage is a folder:
#            the first link has the SHA-256: True
#            the real path has the SHA-256: False
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check huggingface_hub==2.4.0 hf-xet==1.8.0
cat > cached.py <<'PYTHON'
import hashlib
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import hf_xet

content = os.urandom(300_000)
sha256 = hashlib.sha256(content).hexdigest()
Path("content").write_bytes(content)
storage = f"local://{Path.cwd()}/storage"
with hf_xet.XetSession().new_upload_commit(endpoint=storage) as commit:
    upload = commit.start_upload_file("content")


class Hub(BaseHTTPRequestHandler):
    """Answers for one file, and for the token of its Xet storage."""

    def do_GET(self) -> None:
        token = f"{os.environ['HF_ENDPOINT']}/token"
        of_file = {"X-Xet-Hash": upload.result().xet_info.hash, "Link": f'<{token}>; rel="xet-auth"'}
        of_file |= {"X-Repo-Commit": "1" * 40, "X-Linked-ETag": f'"{sha256}"', "X-Linked-Size": str(len(content))}
        of_token = {"X-Xet-Cas-Url": storage, "X-Xet-Access-Token": "one", "X-Xet-Token-Expiration": "9999999999"}
        self.send_response(200)
        for name, value in (of_token if self.path == "/token" else of_file).items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": "home"}

from huggingface_hub import hf_hub_download  # It reads the variables when it is imported.

path = Path(hf_hub_download("acme/texts", "a.parquet", repo_type="dataset", revision="1" * 40))
assert path.read_bytes() == content
first, last = path.readlink().name == sha256, path.resolve().name == sha256
print("the first link has the SHA-256:", first)
print("the real path has the SHA-256:", last)
sys.exit(not (first and not last))
PYTHON
env -u HF_HUB_DISABLE_XET env/bin/python cached.py
