#!/bin/sh
# Debian's chromium for the tests of the page, where it is missing and can be had without a question.
# Never fails: those tests are skipped without a browser, and say so.
set -u
for name in chromium chromium-browser; do
    command -v "$name" > /dev/null && exit 0
done
skipped="the tests of the page will be skipped"
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "There is no chromium, and no root with apt-get to install it: $skipped."
    exit 0
fi

get() {
    DEBIAN_FRONTEND=noninteractive timeout -k 10 "$@" > /dev/null 2>&1
}

install_browser() {
    get 240 apt-get install --yes --no-install-recommends chromium
}

echo "Installing chromium for the tests of the page ..."
install_browser || { get 120 apt-get update && install_browser; } \
    || echo "chromium could not be installed: $skipped."
