# Homebrew formula, for a tap: brew install OWNER/tap/cpuchat
#
# A release fills in OWNER, the version in the URL and its sha256 (brew bump-formula-pr does). Python libraries are those
# of constraints.txt, as wheels; only the engine is compiled, for this CPU and without Metal.
#
# Checked with ruby -c; neither audited by brew nor installed yet where this was written.
class Cpuchat < Formula
  desc "Terminal chat for local language models on CPUs"
  homepage "https://github.com/OWNER/cpuchat"
  url "https://github.com/OWNER/cpuchat/archive/refs/tags/v0.1.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license "MIT"

  depends_on "cmake" => :build
  depends_on "ninja" => :build
  depends_on "uv" => :build
  depends_on "python@3.13"

  def install
    ENV["CMAKE_ARGS"] = "-DGGML_OPENMP=OFF -DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_OPENSSL=OFF " \
                       "-DCMAKE_CXX_FLAGS=-fno-dse"
    ENV["SKBUILD_CMAKE_DEFINE"] = "CMAKE_PROJECT_INCLUDE_BEFORE=#{buildpath}/.ci/engine.cmake"
    ENV["UV_PYTHON_DOWNLOADS"] = "never"
    system "uv", "venv", "--python", Formula["python@3.13"].opt_bin/"python3.13", libexec
    system "uv", "pip", "install", "--no-config", "--python", libexec/"bin/python", "--constraints", "constraints.txt",
           "--no-binary", "llama-cpp-python", "."
    bin.install_symlink libexec/"bin/cpuchat"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/cpuchat --version")
    assert_match(/\w/, shell_output("#{bin}/cpuchat ask --max-tokens 8 Hello"))
  end
end
