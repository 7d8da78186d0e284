// Pictures that are attached to a question, made small enough to be sent and kept.

const LARGEST_SIDE = 1536; // pixels; models see a picture smaller than that
const SMALL = 1 << 18; // bytes: so few are sent as they are
const LARGEST_FILE = 64 << 20;
const SENT_AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp"];
const QUALITY = 0.85;

/** Whether a file says that it is a picture of pixels. */
export function isPicture(file) {
  return file.type.startsWith("image/") && !file.type.includes("svg");
}

/** { name, url } of a picture: a data: URL. Throws an Error, whose message names the file, for one that cannot be read. */
export async function pictureOf(file) {
  const name = file.name || "picture";
  if (file.size > LARGEST_FILE) throw new Error(`${name} has more than 64 MiB, the limit`);
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(`${name} is no picture that this browser can read`);
  });
  try {
    const isSmall = file.size <= SMALL && Math.max(bitmap.width, bitmap.height) <= LARGEST_SIDE;
    return { name, url: isSmall && SENT_AS_THEY_ARE.includes(file.type) ? await asUrl(file) : drawn(bitmap) };
  } finally {
    bitmap.close();
  }
}

function asUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

/** A JPEG of the picture, with white where it is transparent. */
function drawn(bitmap) {
  const scale = Math.min(1, LARGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}
