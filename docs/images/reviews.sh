#!/bin/sh
# Draw reviews.svg: the first six rows of examples/reviews on the small local model, killed in the middle of the run.
# From the root of a checkout, after `make demo`: docs/images/reviews.sh
set -eu
root=$(pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp examples/reviews/* "$scratch"
cd "$scratch"
head -n 7 reviews.csv > six.csv
"$root/.venv/bin/plait" run -q reviews.yaml --backend local --set reviews=six.csv & sleep 5; kill -9 $!
"$root/.venv/bin/plait" graph last --output "$root/docs/images/reviews.svg"
