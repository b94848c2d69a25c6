#!/bin/sh
# Make a password for each of Redis' users, and the ACL file that holds their hashes.
#
#   sh deploy/secrets.sh [FOLDER]          FOLDER is ./secrets unless given
#
# What exists stays: run it again after an upgrade to renew the ACL file, or delete one file to
# change that password; then restart Redis and whoever uses it. REDIS_ACL names another list of
# users, such as users-6.2.acl.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-secrets}
rules=$here/redis/${REDIS_ACL:-users.acl}

umask 077
mkdir -p "$folder"
# Nobody else gets through the folder. The files themselves are readable: inside a container, where
# only single files are mounted, the reader is not their owner.
chmod 700 "$folder"

password() {
    [ -s "$folder/$1" ] || od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n' >"$folder/$1"
    chmod 444 "$folder/$1"
}

cp "$rules" "$folder/users.acl.new"
for user in admin worker producer observer metrics; do
    password "$user"
    hash=$(sha256sum <"$folder/$user" | cut -d' ' -f1)
    sed -i "s/^user $user on/& #$hash/" "$folder/users.acl.new"
done
password grafana
chmod 444 "$folder/users.acl.new"
mv -f "$folder/users.acl.new" "$folder/users.acl"
echo "$folder: passwords of admin, worker, producer, observer, metrics, grafana; users.acl"
