#include "bundle/sha256.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace tide {
namespace {

constexpr std::size_t kBlock = 64;
constexpr std::size_t kChunk = std::size_t{1} << 20;

constexpr std::array<std::uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using Words = std::array<std::uint32_t, 8>;

constexpr std::uint32_t rotated(std::uint32_t word, int bits) { return (word >> bits) | (word << (32 - bits)); }

void take(Words& hash, unsigned char const* block) {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t i = 0; i < 16; ++i) {
    unsigned char const* const at = block + 4 * i;
    w[i] = std::uint32_t{at[0]} << 24 | std::uint32_t{at[1]} << 16 | std::uint32_t{at[2]} << 8 | at[3];
  }
  for (std::size_t i = 16; i < 64; ++i) {
    std::uint32_t const small = rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ (w[i - 15] >> 3);
    std::uint32_t const large = rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + small + w[i - 7] + large;
  }
  auto [a, b, c, d, e, f, g, h] = hash;
  for (std::size_t i = 0; i < 64; ++i) {
    std::uint32_t const chosen = (e & f) ^ (~e & g);
    std::uint32_t const majority = (a & b) ^ (a & c) ^ (b & c);
    std::uint32_t const first = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + chosen + kRounds[i] + w[i];
    std::uint32_t const second = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + majority;
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  Words const added = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < hash.size(); ++i) hash[i] += added[i];
}

}  // namespace

std::string sha256(std::function<std::size_t(char* to, std::size_t size)> const& read) {
  Words hash = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::vector<unsigned char> chunk(kChunk + 2 * kBlock);
  std::uint64_t total = 0;
  std::size_t left = 0;  // bytes of the last chunk; only that one is no multiple of a block
  while (true) {
    left = read(reinterpret_cast<char*>(chunk.data()), kChunk);
    total += left;
    if (left < kChunk) break;
    for (std::size_t at = 0; at < kChunk; at += kBlock) take(hash, chunk.data() + at);
  }
  // A one bit, zeros, and the length in bits at the end of a block.
  std::size_t const padded = (left + 1 + 8 + kBlock - 1) / kBlock * kBlock;
  std::memset(chunk.data() + left, 0, padded - left);
  chunk[left] = 0x80;
  for (std::size_t i = 0; i < 8; ++i) chunk[padded - 1 - i] = static_cast<unsigned char>((8 * total) >> (8 * i));
  for (std::size_t at = 0; at < padded; at += kBlock) take(hash, chunk.data() + at);

  std::string hex;
  for (std::uint32_t const word : hash) {
    for (int shift = 28; shift >= 0; shift -= 4) hex += "0123456789abcdef"[word >> shift & 15];
  }
  return hex;
}

std::string sha256_of(std::string const& text) {
  std::size_t at = 0;
  return sha256([&](char* to, std::size_t size) {
    std::size_t const count = std::min(size, text.size() - at);
    std::memcpy(to, text.data() + at, count);
    at += count;
    return count;
  });
}

}  // namespace tide
